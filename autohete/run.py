"""One model and optimizer in training under autohete, from attach() to detach()."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autohete import _C
from autohete.config import Config
from autohete.devices import CudaSide, HostSide, Side
from autohete.guard import UnitGuard
from autohete.hooks import RootForward, UnitCall, UnitForward, in_backward
from autohete.layout import check_budgets, check_pair, convert, safest_plan
from autohete.measure import StepMeter, build_profile, lane_rates
from autohete.planning import (
    ActivationRule,
    InfeasibleError,
    Plan,
    Tier,
    format_bytes,
    load_profile,
    make_plan,
    minimum_gpu_mem,
    save_profile,
)
from autohete.stepping import OptimizerBridge
from autohete.units import Unit, find_units

_log = logging.getLogger("autohete")


class Run:
    """Wires units, hooks, guards, the engine and the optimizer together.

    Everything here runs on the thread that runs the user's loop.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: Config, device: torch.device
    ) -> None:
        check_pair(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.gpu_mem = config.budget_for(device)
        self.cpu_mem = config.host_budget()
        self.units: list[Unit] = find_units(model, config.layers)
        self.bridge = OptimizerBridge(self, optimizer)
        if device.type != "cpu" and not self.bridge.native:
            raise ValueError(
                f"optimizer is {type(optimizer).__name__}, expected AdamW, Adam or "
                "autohete.CPUAdamW (not differentiable) on a GPU; others are stepped on the host "
                'device only, .to("cpu")'
            )
        masters_kept = check_budgets(self.units, self.bridge, config, self.gpu_mem, self.cpu_mem)
        self.side: Side = (
            HostSide(self.gpu_mem, self.cpu_mem, pin=config.pin)
            if device.type == "cpu"
            else CudaSide(device, self.gpu_mem, self.cpu_mem, pin=config.pin)
        )
        self.engine = _C.Engine(self.side.handle, config.num_workers or 0)
        self.plan: Plan | None = None
        self.profile: _C.Profile | None = None
        self.step_seconds: list[float] = []
        self.num_steps = 0
        self._placements: list[_C.UnitPlan] = []
        self._hooked: list[UnitForward | RootForward] = []
        self._guards = [self._make_guard(index) for index in range(len(self.units))]
        self._moments: list[list[Tensor]] = [[] for _ in self.units]
        self._users = [0] * len(self.units)
        self._committed = [False] * len(self.units)
        self._open_calls: list[UnitCall] = []
        self._backward_open = False
        self._meter: StepMeter | None = None
        self._last_commit: float | None = None
        self._attach(masters_kept)

    # ---------------------------------------------------------------- attach and detach

    def _attach(self, masters_kept: bool) -> None:
        start = time.perf_counter()
        first = next(self.model.parameters(), None)
        origin = torch.device("cpu") if first is None or first.is_meta else first.device
        try:
            self._move_in()
            self.side.check_host_memory()
            self._start_plan()
            self._install()
        except BaseException:
            self.detach(origin)
            raise
        _log.info(
            "autohete: %d units of %s wrapped in %.2f s (host memory %s%s); gpu_mem=%s, cpu_mem=%s",
            len(self.units),
            type(self.model).__name__,
            time.perf_counter() - start,
            format_bytes(self.side.host_peak()),
            ", pinned" if self.config.pin else ", not pinned",
            format_bytes(self.gpu_mem),
            format_bytes(self.cpu_mem),
        )
        self.attach_seconds = time.perf_counter() - start

    def _move_in(self) -> None:
        """Give each unit's parameters their home, one unit at a time."""
        safest = safest_plan(self.units, self.bridge.native)
        for unit, placement in zip(self.units, safest, strict=True):
            masters = convert(unit, self.config.precision)
            updated = [self.bridge.updates(p) for p in unit.parameters]
            self.engine.add_unit(
                name=unit.name,
                parameters=unit.parameters,
                masters=masters,
                updated=updated,
                with_state=self.bridge.native,
                amsgrad=self.bridge.amsgrad,
                plan=placement,
            )
        self._move_buffers(self.side.torch_device)

    def _move_buffers(self, device: torch.device) -> None:
        moved: dict[int, Tensor] = {}  # one that two modules share stays one
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.device == device:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = (
                        torch.zeros_like(buffer, device=device)
                        if buffer.is_meta
                        else buffer.to(device)
                    )
                module._buffers[name] = moved[id(buffer)]

    def _start_plan(self) -> None:
        given = self.config.plan
        if given is not None:
            plan = given if isinstance(given, Plan) else self._load_plan(given)
            self._apply(plan)
            self.plan = plan
            self.side.set_advice(
                "Give more gpu_mem, a plan that offloads or recomputes more, or a smaller batch."
            )
            return
        safest = Plan()
        safest.units = safest_plan(self.units, self.bridge.native)
        safest.window = self.config.window
        safest.chunk_bytes = self.config.chunk_bytes
        self._apply(safest)
        self._meter = StepMeter(self.side, self.units)
        self.engine.record_timeline(True)
        self.side.set_advice(
            "This is the first step, under the plan that needs least; a smaller batch or shorter "
            "sequences need less."
        )

    @staticmethod
    def _load_plan(path: Any) -> Plan:
        plan = load_profile(path)[1]
        if plan is None:
            raise ValueError(
                f"plan: {path} holds a profile without a plan; make one with make_plan"
            )
        return plan

    def _install(self) -> None:
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                self._hook(UnitForward(self, module, index))
        self._hook(RootForward(self, self.model))
        self.bridge.install()
        self._guard_all()

    def _hook(self, forward: UnitForward | RootForward) -> None:
        forward.install()
        self._hooked.append(forward)

    def detach(self, device: torch.device | None = None) -> None:
        """Leave model and optimizer as plain PyTorch objects with the newest values.

        Args:
            device: where their tensors are afterwards; left out: where they trained.

        Raises:
            torch.OutOfMemoryError: they do not fit there as plain tensors; nothing has changed.
        """
        target = device or self.side.torch_device
        self._check_room(target)
        self.abandon()
        self.bridge.remove()
        for forward in reversed(self._hooked):
            forward.remove()
        self._hooked.clear()
        self.side.charge_activations(False)
        self.synchronize()
        self.engine.leave(target)
        self._move_buffers(target)
        self.side.close()

    def _check_room(self, target: torch.device) -> None:
        if not isinstance(self.side, CudaSide) or target != self.side.torch_device:
            return
        needed, free = self.engine.bytes_to_leave(), self.side.free_for_plain_tensors()
        if needed > free:
            raise torch.OutOfMemoryError(
                f"unwrap: model and optimizer state need {format_bytes(needed)} more on {target} "
                f"as plain tensors, but {format_bytes(free)} are free there; keep them on the CPU: "
                'unwrap("cpu")'
            )

    @property
    def attached(self) -> bool:
        return bool(self._hooked)

    # ---------------------------------------------------------------- guards

    def _make_guard(self, index: int) -> UnitGuard:
        run = weakref.ref(self)

        def settle() -> None:
            alive = run()
            if alive is not None:
                alive.settle(index)

        def settle_gradients() -> None:
            alive = run()
            if alive is not None:
                alive.settle_gradients(index)

        return UnitGuard(settle, settle_gradients)

    def is_managed(self, index: int) -> bool:
        """Whether the engine moves anything of the unit."""
        return self._placements[index].optimizer_state == Tier.HOST

    def _guard(self, index: int) -> None:
        if self.is_managed(index) and self._users[index] == 0:
            self._guards[index].wear(self.units[index].parameters, [])

    def _guard_all(self) -> None:
        for index in range(len(self.units)):
            self._guard(index)
        self.engine.take_back()

    def settle(self, index: int) -> None:
        """Wait until the unit's tensors are final; they are plain tensors afterwards."""
        if index < self.engine.num_units():
            self.engine.settle(index)
        self._committed[index] = False
        parameters = self.units[index].parameters
        self._guards[index].take_off(parameters, self._moments[index])
        self._guards[index].take_off_gradients(parameters)

    def settle_gradients(self, index: int) -> None:
        """Wait until the unit's gradients are whole and nothing reads or writes them."""
        if self._committed[index]:
            self.settle(index)
        elif index < self.engine.num_units():
            self.engine.settle_gradients(index)
        self._guards[index].take_off_gradients(self.units[index].parameters)

    def synchronize(self) -> None:
        """Wait for everything in flight; parameters, gradients and moments hold newest values."""
        for index in range(len(self.units)):
            self.settle(index)

    # ---------------------------------------------------------------- forward and backward

    def recomputes(self, index: int) -> bool:
        return self._placements[index].activations == ActivationRule.RECOMPUTE

    def metered(self, forward: UnitForward) -> Callable[..., Any]:
        """The unit's own forward, watched while the first step is measured."""
        if self._meter is None:
            return forward.forward
        return self._meter.metered(forward.unit, forward.forward)

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracked = torch.is_grad_enabled()
        if self._open_calls or self._backward_open or any(self._users):
            self.abandon()
        if tracked and self._meter is not None and self._meter.complete and self.num_steps:
            self._plan_from_measured_step()
        self._guard_all()
        self.side.charge_activations(True)
        if tracked and self._meter is not None and not self._meter.complete:
            self._meter.begin()

    def end_forward(self) -> None:
        if not torch.is_grad_enabled():
            self.side.charge_activations(False)
        elif meter := self._measuring():
            meter.forward_over()

    def _measuring(self) -> StepMeter | None:
        """The meter, while the first step is being measured."""
        return None if self._meter is None or self._meter.complete else self._meter

    def enter_forward(self, index: int, tracked: bool) -> None:
        backward = in_backward()
        if self.is_managed(index):
            direction = _C.Direction.FORWARD if tracked else _C.Direction.FORWARD_ONLY
            self._acquire(index, _C.Direction.BACKWARD if backward else direction)
        if tracked and not backward and (meter := self._measuring()):
            meter.forward_begins(index)

    def leave_forward(self, index: int, tracked: bool) -> None:
        if tracked and not in_backward() and (meter := self._measuring()):
            meter.forward_ends(index)
        if self.is_managed(index):
            self._release(index)

    def _acquire(self, index: int, direction: _C.Direction) -> None:
        self.engine.acquire(index, direction)
        self._users[index] += 1
        if self._users[index] == 1:
            self._committed[index] = False
            self._guards[index].take_off(self.units[index].parameters, [])

    def _release(self, index: int) -> None:
        if self._users[index] == 0:
            return
        self.engine.release(index)
        self._users[index] -= 1
        self._guard(index)

    def begin_backward(self, gradient: Tensor | None = None) -> None:
        """Find the end of the outermost backward; called from a hook inside it."""
        if self._backward_open:
            return
        self._backward_open = True
        self.side.charge_activations(True)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def enter_backward(self, call: UnitCall) -> None:
        self.begin_backward()
        if not self.is_managed(call.unit) and not self._measuring():
            return
        self._open_calls.append(call)
        if self.is_managed(call.unit):
            self._acquire(call.unit, _C.Direction.BACKWARD)
        if meter := self._measuring():
            meter.backward_begins(call.unit)

    def leave_backward(self, call: UnitCall) -> None:
        if call not in self._open_calls:
            return
        self._open_calls.remove(call)
        if meter := self._measuring():
            meter.backward_ends(call.unit)
        if self.is_managed(call.unit):
            self._release(call.unit)
            if self._users[call.unit] == 0:
                self.engine.send_gradients(call.unit)
                self._guards[call.unit].wear_gradients(self.units[call.unit].parameters)

    def end_backward(self) -> None:
        """The outermost backward is over: all gradients are final."""
        self._backward_open = False
        for call in self._open_calls:
            call.is_open = False
        self._open_calls.clear()
        if meter := self._measuring():
            meter.backward_over()
        self.engine.finish_backward()
        self.side.charge_activations(False)
        for index in range(len(self.units)):
            self._users[index] = 0
            self._guard(index)
            if self.is_managed(index):
                self._guards[index].wear_gradients(self.units[index].parameters)

    def abandon(self) -> None:
        """A forward or backward was left by an exception: nothing is in use any more."""
        self._backward_open = False
        for call in self._open_calls:
            call.is_open = False
        self._open_calls.clear()
        if self.engine.num_units():
            self.engine.finish_backward()
            self.engine.abandon()
        self._users = [0] * len(self.units)
        self.side.charge_activations(False)
        if self._meter is not None and not self._meter.complete:
            self._meter = StepMeter(self.side, self.units)
        if self._placements:
            self._guard_all()

    # ---------------------------------------------------------------- the step

    def step(self) -> None:
        """Start the updates of this step and return; see OptimizerBridge for what precedes it."""
        self.side.charge_activations(False)
        if self._open_calls or self._backward_open or any(self._users):
            self.abandon()
        self._moments = self.bridge.commit()
        for index, unit in enumerate(self.units):
            if self.is_managed(index):
                self._committed[index] = True
                self._guards[index].wear(unit.parameters, self._moments[index])
                self._guards[index].wear_gradients(unit.parameters)
        self._count_step()

    def step_elsewhere(self, step: Callable[[], Any]) -> Any:
        """Run an optimizer's own step on tensors that are all in place."""
        self.side.charge_activations(False)
        self.synchronize()
        result = step()
        self._guard_all()
        self._count_step()
        return result

    def _count_step(self) -> None:
        now = time.perf_counter()
        if self._last_commit is not None:
            self.step_seconds.append(now - self._last_commit)
        self._last_commit = now
        self.num_steps += 1

    # ---------------------------------------------------------------- plans

    def _apply(self, plan: Plan) -> None:
        if len(plan.units) != len(self.units):
            raise ValueError(
                f"plan: it has {len(plan.units)} units, expected {len(self.units)} "
                f"(this model's); make a new plan for this model"
            )
        self.engine.configure(plan.units, plan.window, plan.chunk_bytes)
        self.side.check_host_memory()
        self._placements = list(plan.units)
        if self._hooked:
            self.bridge.publish_states()
            for index in range(len(self.units)):
                self._guards[index].take_off(self.units[index].parameters, self._moments[index])
            self._guard_all()

    def _plan_from_measured_step(self) -> None:
        meter, self._meter = self._meter, None
        assert meter is not None
        self.synchronize()
        spans = self.engine.take_timeline()
        self.engine.record_timeline(False)
        updated = sum(p.numel() for u in self.units for p in u.parameters if self.bridge.updates(p))
        sizes = [
            (self.engine.param_bytes(i), self.engine.gradient_bytes(i), self.engine.state_bytes(i))
            for i in range(len(self.units))
        ]
        profile = build_profile(
            meter, self.units, sizes, lane_rates(spans, updated) | self.side.rates()
        )
        profile.gradient_accumulation_steps = self.config.gradient_accumulation_steps
        profile.chunk_bytes = self.config.chunk_bytes
        self.profile = profile
        if not self.bridge.native:
            return self._keep_safest_plan()
        try:
            plan = make_plan(
                profile,
                self.side.plannable(),
                self.cpu_mem,
                strategy=self.config.strategy,
                window=self.config.window,
            )
        except InfeasibleError as error:
            # The safest plan has just run within the budget: the estimate is on the safe side.
            _log.warning("autohete: %s; going on with the plan of the first step", error)
            return self._keep_safest_plan()
        self._apply(plan)
        self.plan = plan
        self._advise_by_profile(profile)
        self.side.reset_peak()
        self.step_seconds.clear()
        self._last_commit = None
        _log.info("autohete: planned\n%s", plan)
        if self.config.profile_path is not None:
            save_profile(self.config.profile_path, profile, plan)

    def _advise_by_profile(self, profile: _C.Profile) -> None:
        least = minimum_gpu_mem(profile, self.cpu_mem, window=self.config.window)
        self.side.set_advice(
            f"For steps as the first one was, gpu_mem={least} bytes would fit; larger ones need "
            "more: give it, or smaller batches, or shorter sequences."
        )

    def _keep_safest_plan(self) -> None:
        plan = Plan()
        plan.units = self._placements
        plan.window = self.config.window
        plan.chunk_bytes = self.config.chunk_bytes
        plan.strategy = "safest"
        self.plan = plan
