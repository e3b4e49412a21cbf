"""One model and optimizer in training under autohete, from attaching to detach().

Over 350 lines: who may touch a unit's tensors when is one story, told in one place.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autohete import _C
from autohete.config import Config
from autohete.devices import CudaSide, HostSide, Side
from autohete.distributed import Ranks, find_group
from autohete.early import EarlyUpdates
from autohete.exchange import GradientExchange
from autohete.guard import UnitGuard
from autohete.hooks import (
    PEEKING,
    HookedForward,
    PeekingForward,
    RootForward,
    UnitCall,
    UnitForward,
    in_backward,
)
from autohete.layout import (
    check_budgets,
    check_gradients,
    check_pair,
    convert,
    host_ranges,
    leave_meta,
    move_buffers,
    safest_plan,
)
from autohete.other_optimizers import OtherOptimizers
from autohete.planning import Plan, format_bytes
from autohete.run_plan import RunPlan
from autohete.run_trace import RunTrace
from autohete.sized_profiles import Size, size_of
from autohete.stepping import OptimizerBridge
from autohete.units import Unit, find_units

_log = logging.getLogger("autohete")


# A forked child finds memory as it is at the fork, and no threads: nothing may be in flight then.
# The hooks cannot be taken back, so they are for all the runs that are still alive.
_LIVE: weakref.WeakSet[Run] = weakref.WeakSet()


def _rest_all() -> None:
    for run in list(_LIVE):
        run.rest()


def _at_exit() -> None:
    """Other ranks may wait for our part of an update, and Python's threads end soon."""
    for run in list(_LIVE):
        if run.ranks is not None:
            run.rest()


os.register_at_fork(before=_rest_all)
atexit.register(_at_exit)


def _bring_parts(ranks: Ranks) -> Callable[[Any, Sequence[Tensor]], None]:
    def bring(unit: Any, parameters: Sequence[Tensor]) -> None:
        ranks.bring_parts(parameters, ranks.parts)

    return bring


# What the engine counts of each lane; of compute, what it waited.
_LANE_SECONDS = {
    "compute": "wait_seconds",
    "h2d": "h2d_busy_seconds",
    "d2h": "d2h_busy_seconds",
    "cpu": "cpu_busy_seconds",
}


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
        self.ranks = find_group(config.process_group, device)
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
        if self.ranks and not config.whole_gradients and not self.bridge.native:
            raise ValueError(
                f"whole_gradients is False and the optimizer {type(optimizer).__name__}, expected "
                "AdamW, Adam or autohete.CPUAdamW; others step whole parameters on every rank"
            )
        masters_kept = check_budgets(self.units, self.bridge, config, self.gpu_mem, self.cpu_mem)
        self.side: Side = (
            HostSide(self.gpu_mem, self.cpu_mem, pin=config.pin)
            if device.type == "cpu"
            else CudaSide(device, self.gpu_mem, self.cpu_mem, pin=config.pin)
        )
        self.engine = _C.Engine(self.side.handle, config.num_workers or 0)
        if self.ranks:
            self.engine.set_ranks(
                self.ranks.rank,
                self.ranks.size,
                _bring_parts(self.ranks),
                own_gradients=not config.whole_gradients,
            )
        alive = weakref.proxy(self)
        self.exchange: GradientExchange | None = None
        if self.ranks:
            self.exchange = GradientExchange(
                self.ranks,
                self.units,
                prepare=lambda unit: alive.settle_gradients(unit),
                arrived=lambda unit: alive.send_gradients(unit, averaged=True),
                own_rows=not config.whole_gradients,
            )
        self.plans = RunPlan(
            config, self.units, self.bridge, self.side, self.engine, self.cpu_mem, self.ranks,
            self.exchange,
        )  # fmt: skip
        if self.exchange:
            self.exchange.wants_plan = self.plans.is_measured
            self.exchange.timing = self.plans.exchange_times
        self.step_seconds: list[float] = []
        self.num_steps = 0
        self.trace: RunTrace | None = None  # while the user wants one
        self._hooked: list[HookedForward] = []
        self._guards = [self._make_guard(index) for index in range(len(self.units))]
        self._moments: list[list[Tensor]] = [[] for _ in self.units]
        # Parameters of classes of their own cannot wear a guard: their units are waited for.
        self._unguarded = [
            index
            for index, unit in enumerate(self.units)
            if any(type(p) is not nn.Parameter for p in unit.parameters)
        ]
        self.owner: Callable[[], Any] | None = None  # the wrapper, weakly
        self.lock = threading.RLock()  # one forward at a time, and no step beside it
        self._users = [0] * len(self.units)
        self._committed = [False] * len(self.units)
        self._open_calls: list[UnitCall] = []
        self._backward_open = False
        self._depth = 0  # of forwards of the whole model inside each other
        self.user_checkpoints = False  # units were called inside a checkpoint of the user's
        self._forwards_wait = False  # a forward has run since the last step
        self._in_a_step = False  # a backward has run since the last one
        self._adds_up = False  # a forward has found gradients of its own step
        self._last_commit: float | None = None
        self._shares_from: tuple[float, dict[str, Any]] | None = None
        self._shares_to: tuple[float, dict[str, Any]] | None = None
        self.early = EarlyUpdates(weakref.proxy(self), config.updates_early())
        self._others = OtherOptimizers(self)
        self._attach(masters_kept)
        _LIVE.add(self)

    # ---------------------------------------------------------------- attach and detach

    def _attach(self, masters_kept: bool) -> None:
        start = time.perf_counter()
        first = next(self.model.parameters(), None)
        origin = torch.device("cpu") if first is None or first.is_meta else first.device
        try:
            self._move_in()
            self.side.check_host_memory()
            self.plans.start()
            self._install()
        except BaseException:
            self.detach(origin, whole=False)
            raise
        self.attach_seconds = time.perf_counter() - start
        _log.info(
            "autohete: %d units of %s wrapped in %.2f s (host memory %s%s); gpu_mem=%s, cpu_mem=%s",
            len(self.units),
            type(self.model).__name__,
            self.attach_seconds,
            format_bytes(self.side.host_peak()),
            ", pinned" if self.config.pin else ", not pinned",
            format_bytes(self.gpu_mem),
            format_bytes(self.cpu_mem),
        )

    def _move_in(self) -> None:
        """Give each unit's parameters their home, one unit at a time."""
        safest = safest_plan(self.units, self.bridge.native)
        for unit, placement in zip(self.units, safest, strict=True):
            sources = host_ranges(unit)
            if self.ranks:  # all begin with the first rank's
                leave_meta(unit)
                self.ranks.broadcast(p.data for p in unit.parameters)
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
            del masters
            _C.release_file_pages(sources)
        move_buffers(self.model, self.side.torch_device)
        if self.ranks:
            self.ranks.broadcast(self.model.buffers())

    def _install(self) -> None:
        for index, unit in enumerate(self.units):
            assert unit.has_its_parameters()  # takes note of them
            for module in unit.modules:
                self._hook(UnitForward(self, module, index))
        for module in self.model.modules():
            if isinstance(module, PEEKING):
                self._hook(PeekingForward(self, module))
        self._hook(RootForward(self, self.model))
        self.bridge.install()
        self._guard_all()

    def _hook(self, forward: HookedForward) -> None:
        forward.install()
        self._hooked.append(forward)

    def detach(self, device: torch.device | None = None, *, whole: bool = True) -> None:
        """Leave model and optimizer as plain PyTorch objects with the newest values.

        Args:
            device: where their tensors are afterwards; left out: where they trained.
            whole: of several ranks each gets the whole optimizer state, so all have to call this.

        Raises:
            torch.OutOfMemoryError: they do not fit there as plain tensors; nothing has changed.
        """
        target = device or self.side.torch_device
        if target == self.side.torch_device:
            self.side.check_room_for_plain_tensors(self.engine.bytes_to_leave())
        self.abandon()
        self._others.stop()
        self.early.detach()
        self.bridge.remove()
        for forward in reversed(self._hooked):
            forward.remove()
        self._hooked.clear()
        self.side.charge_activations(False)
        for index in range(len(self.units)):
            self.settle(index, adopt=False)
        together = self.ranks is not None and whole and not self.ranks.failed
        states = self.bridge.whole_states() if together else []
        self.engine.leave(target)
        for parameter, key, state in states:
            self.optimizer.state[parameter][key] = state.to(target)
        move_buffers(self.model, target)
        self.side.close()
        if self.ranks:
            self.ranks.close()

    def check_is_left(self, what: str) -> None:
        """Raise RuntimeError where this thread is inside a forward or backward of the model."""
        lock: Any = self.lock
        if (self._depth and lock._is_owned()) or (self._backward_open and in_backward()):
            raise RuntimeError(
                f"{what}: called from a hook inside forward or backward of the model, expected a "
                "call between steps; set a flag there, and call it after backward()"
            )

    def __del__(self) -> None:
        """Garbage with updates in flight: who kept parameters or moments gets newest values."""
        with contextlib.suppress(Exception):  # half made, say
            if self.attached and self.ranks is None and not sys.is_finalizing():
                self.synchronize()

    def leave_if_dropped(self) -> None:
        """Detach where nobody has the wrapper any more, who could call unwrap()."""
        if self.owner is not None and self.owner() is None:
            self.detach()

    @property
    def attached(self) -> bool:
        return bool(self._hooked)

    @property
    def plan(self) -> Plan | None:
        """None until the first step was measured."""
        return self.plans.plan

    @property
    def profile(self) -> _C.Profile | None:
        """Of the first step; None before, and when a plan was given."""
        return self.plans.profile

    # ---------------------------------------------------------------- guards

    def _make_guard(self, index: int) -> UnitGuard:
        run = weakref.ref(self)  # tensors outlive runs

        def through(method: Callable[[Run, int], None]) -> Callable[[], None]:
            def settle() -> None:
                if (alive := run()) is not None:
                    method(alive, index)

            return settle

        def answer(func: Any, args: tuple[Any, ...]) -> Any:
            alive = run()
            return NotImplemented if alive is None else alive.early.answer(index, func, args)

        settle_gradients, taken = through(Run.settle_gradients), through(Run.gradients_taken)
        return UnitGuard(through(Run.settle), settle_gradients, answer, taken)

    def _guard(self, index: int) -> None:
        if self.plans.is_managed(index) and self._users[index] == 0:
            self._guards[index].wear(self.units[index].parameters, self._moments[index])

    def _guard_gradients(self, index: int) -> None:
        """Those of classes of their own (p.grad = MyTensor(...)) cannot: they are waited for."""
        if not self._guards[index].wear_gradients(self.units[index].parameters):
            self.settle_gradients(index)

    def _guard_all(self) -> None:
        for index in range(len(self.units)):
            self._guard(index)
        self.engine.take_back()

    def settle(self, index: int, adopt: bool = True) -> None:
        """Wait until the unit's tensors are final; they are plain tensors afterwards."""
        if index < self.engine.num_units():
            self.engine.settle(index, adopt)
        self._committed[index] = False
        parameters = self.units[index].parameters
        self._guards[index].take_off(parameters, self._moments[index])
        self._guards[index].take_off_gradients(parameters)

    def settle_idle(self, index: int) -> None:
        """Settle the unit unless it computes now: then it wears no guard anyway."""
        if self._users[index] == 0:
            self.settle(index)

    def settle_gradients(self, index: int) -> None:
        """Wait until the unit's gradients are whole and nothing reads or writes them."""
        if self._committed[index]:
            self.settle(index)
        elif index < self.engine.num_units():
            self.engine.settle_gradients(index)
        self._guards[index].take_off_gradients(self.units[index].parameters)

    def gradients_taken(self, index: int) -> None:
        """Somebody gets a gradient before step(): it is final, and looked at again in step()."""
        if not self._committed[index]:
            self.settle_gradients(index)

    def rest(self) -> None:
        """Wait until nothing is in flight, outside of forward and backward; errors wait too."""
        if self._hooked and not any(self._users):
            with contextlib.suppress(Exception):  # the next step() says it
                self.synchronize()
                self._guard_all()

    def synchronize(self) -> None:
        """Wait for everything in flight; parameters, gradients and moments hold newest values."""
        for index in range(len(self.units)):
            self.settle(index)

    # ---------------------------------------------------------------- forward and backward

    def metered(self, forward: UnitForward) -> Callable[..., Any]:
        """The unit's own forward, watched while the first step is measured or a trace is on."""
        inner: Callable[..., Any] = forward.forward
        if meter := self.plans.measuring():
            inner = meter.metered(forward.unit, inner)
        return self.trace.recomputing(forward.unit, inner) if self.trace else inner

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracked = torch.is_grad_enabled()
        if self._open_calls or self._backward_open or any(self._users):
            self.abandon()
        outermost = self._depth == 0
        if tracked and outermost:
            self._follow(size_of((args, kwargs)))
        check_gradients(self.engine, self.units)
        self._guard_all()
        if tracked:
            self.early.forward_begins()
        self.side.charge_activations(True)
        if tracked and outermost and (meter := self.plans.measuring()):
            meter.begin()
        self._depth += 1

    def _follow(self, size: Size) -> None:
        """Go over to the plan that the inputs and the steps measured so far speak for."""
        forwards_wait, self._forwards_wait = self._forwards_wait, True
        self._adds_up = self._adds_up or (self._in_a_step and self._has_gradients())
        if not (forwards_wait and self.user_checkpoints):
            self._change_what_is_due(size)
        # else what is recomputed for them later has to save what they did not
        self.plans.time_a_step(size, self.num_steps, self._in_a_step or forwards_wait)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for unit in self.units for p in unit.parameters)

    def _change_what_is_due(self, size: Size) -> None:
        due = self.exchange.plan_is_due if self.exchange else self.plans.is_measured()
        if due and self.num_steps and not self._in_a_step:
            if self.exchange:
                self.exchange.plan_is_due = False
            persist = self._adds_up or self._has_gradients()
            self._change_plan(lambda: self.plans.decide(persist, self.num_steps))
        if self.plans.needs_measuring(size):
            if self.plans.measures_all():
                self.plans.measure_next(size)
            else:  # a step that is only timed is no reason to stay
                self._change_plan(lambda: self.plans.measure_next(size))
        elif not self.plans.measures_all():
            self.plans.use_rules_for(size)

    def _change_plan(self, change: Callable[[], bool | None]) -> None:
        """Make a change at rest; one that returns False has changed nothing."""
        self.synchronize()
        self.bridge.adopt_states()  # the user may have cleared or replaced them
        if change() is False:
            return
        self.bridge.publish_states()
        self.early.plan_changed()
        self.step_seconds.clear()
        self._last_commit = None
        self._shares_from = None

    def end_forward(self) -> None:
        self._depth -= 1
        if not torch.is_grad_enabled():
            self.side.charge_activations(False)
        elif meter := self.plans.measuring():
            meter.forward_over()

    def recomputes(self, index: int) -> bool:
        """Whether the unit's forward runs again in backward. With exchanged parameters it cannot:
        they may not be there any more then.
        """
        return self.plans.recomputes(index) and self.units[index].has_its_parameters()

    def enter_forward(self, index: int, tracked: bool) -> None:
        backward = in_backward()
        if self.plans.is_managed(index):
            direction = _C.Direction.FORWARD if tracked else _C.Direction.FORWARD_ONLY
            self._acquire(index, _C.Direction.BACKWARD if backward else direction)
        if tracked and not backward:
            self.early.used(index)
            if meter := self.plans.measuring():
                meter.forward_begins(index)
        if self.trace:
            self.trace.begins(index, "recompute" if backward else "forward")

    def leave_forward(self, index: int, tracked: bool) -> None:
        if self.trace:
            self.trace.ends(index, "recompute" if in_backward() else "forward")
        if tracked and not in_backward() and (meter := self.plans.measuring()):
            meter.forward_ends(index)
        if self.plans.is_managed(index):
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
        self._backward_open = self._in_a_step = True
        self.early.backward_begins()
        self.side.charge_activations(True)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def enter_backward(self, call: UnitCall) -> None:
        self.begin_backward()
        watched = self.plans.measuring() or self.trace or self.exchange
        if not self.plans.is_managed(call.unit):
            self.engine.land_gradients()  # of units whose backward is over: nobody else would
            if not watched:
                return
        self._open_calls.append(call)
        if self.plans.is_managed(call.unit):
            self._acquire(call.unit, _C.Direction.BACKWARD)
        if meter := self.plans.measuring():
            meter.backward_begins(call.unit)
        if self.trace:
            self.trace.begins(call.unit, "backward")

    def leave_backward(self, call: UnitCall) -> None:
        if call not in self._open_calls:
            return
        self._open_calls.remove(call)
        if self.trace:
            self.trace.ends(call.unit, "backward")
        if meter := self.plans.measuring():
            meter.backward_ends(call.unit)
        if self.plans.is_managed(call.unit):
            self._release(call.unit)
        final = self.early.visited(call.unit)
        if self.exchange and self.exchange.enabled:
            if final:
                self.exchange.left(call.unit)
        else:
            self.send_gradients(call.unit, final)

    def send_first_gradients(self, index: int) -> None:
        """Backward is in the middle of the unit: what it has of gradients leaves already."""
        in_backward = self._backward_open and self._users[index] == 1
        if not in_backward or not self.early.in_last_visit(index):
            return
        if self.engine.send_first_gradients(index):
            self._guard_gradients(index)

    def send_gradients(self, index: int, final: bool = True, averaged: bool = False) -> None:
        """Backward is through with a call of the unit, the last one if `final`: gradients leave.

        Args:
            averaged: over the ranks.
        """
        if self.plans.is_managed(index) and self._users[index] == 0:
            self.engine.send_gradients(index, final, averaged)
            self._guard_gradients(index)

    def end_backward(self) -> None:
        """The outermost backward is over: all gradients are final."""
        self._backward_open = False
        self._others.backward_over()
        for call in reversed(self._open_calls):
            call.is_open = False
            if self.trace:
                self.trace.ends(call.unit, "backward")
        self._open_calls.clear()
        if meter := self.plans.measuring():
            meter.backward_over()
        if self.exchange:
            self.exchange.finish()
        self.engine.finish_backward(averaged=bool(self.exchange and self.exchange.enabled))
        self.side.charge_activations(False)
        for index in range(len(self.units)):
            self._users[index] = 0
            self._guard(index)
            if self.plans.is_managed(index):
                self._guard_gradients(index)

    def abandon(self) -> None:
        """A forward or backward was left by an exception: nothing is in use any more."""
        self._backward_open = False
        self._depth = 0
        for call in self._open_calls:
            call.is_open = False
        self._open_calls.clear()
        if self.exchange:
            self.exchange.abandon()
        if self.engine.num_units():
            self.engine.withdraw_ahead()
            self.engine.finish_backward()
            self.engine.abandon()
        self._users = [0] * len(self.units)
        self.side.charge_activations(False)
        self.plans.left_by_an_exception()
        if self.plans.placements:
            self._guard_all()

    # ---------------------------------------------------------------- the step

    def step(self) -> None:
        """Start the updates of this step and return; see OptimizerBridge for what precedes it."""
        self.side.charge_activations(False)
        if self._open_calls or self._backward_open or any(self._users):
            self.abandon()
        if self.exchange:
            self.exchange.check_step()
        self._moments = self.bridge.commit()
        for index, unit in enumerate(self.units):
            if self.plans.is_managed(index):
                self._committed[index] = True
                self._guards[index].wear(unit.parameters, self._moments[index])
                self._guard_gradients(index)
        for index in self._unguarded:
            self.settle(index)
        self.plans.step_over(self.num_steps)
        self._count_step()

    def bring_device_parts(self) -> None:
        """Units that the device updated: each rank has its part of them."""
        if self.ranks is None:
            return
        for index, unit in enumerate(self.units):
            if not self.plans.is_managed(index) and (parts := self._device_parts(index, unit)):
                self.ranks.bring_parts(parts, self.ranks.exchange)

    def _device_parts(self, index: int, unit: Unit) -> list[Tensor]:
        return [
            p.data
            for i, p in enumerate(unit.parameters)
            if p.grad is not None and self.bridge.updates(p) and self.engine.part(index, i)[0]
        ]

    def step_elsewhere(self, step: Callable[[], Any]) -> Any:
        """Run an optimizer's own step on tensors that are all in place."""
        self.side.charge_activations(False)
        if self.exchange:
            self.exchange.check_step()
        self.synchronize()
        result = step()
        self._guard_all()
        self._count_step()
        return result

    def lane_shares(self) -> dict[str, float]:
        """Return what each lane was busy for, of the time from the plan's first step to the last.

        Empty before the second step.
        """
        if self._shares_from is None or self._shares_to is None:
            return {}
        (start, before), (end, now) = self._shares_from, self._shares_to
        if end <= start:
            return {}
        shares = {
            f"{lane}_share": min((now[name] - before[name]) / (end - start), 1.0)
            for lane, name in _LANE_SECONDS.items()
        }
        shares["compute_share"] = 1.0 - shares["compute_share"]
        return shares

    def _count_step(self) -> None:
        now = time.perf_counter()
        self._shares_to = (now, self.engine.counters())
        self._shares_from = self._shares_from or self._shares_to
        if self._last_commit is not None:
            self.step_seconds.append(now - self._last_commit)
        self._last_commit = now
        self._in_a_step = self._forwards_wait = False
        self._others.stop()
        self.num_steps += 1
