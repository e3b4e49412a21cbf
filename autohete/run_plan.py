"""The plan a run is under: the safest one while the first step is measured, then the planner's."""

from __future__ import annotations

import logging
from typing import Any

import torch

from autohete import _C
from autohete.config import Config
from autohete.devices import Side
from autohete.layout import safest_plan
from autohete.measure import StepMeter, build_profile, lane_rates
from autohete.planning import (
    ActivationRule,
    InfeasibleError,
    Plan,
    Tier,
    load_profile,
    make_plan,
    minimum_gpu_mem,
    save_profile,
    summarise_plan,
)
from autohete.stepping import OptimizerBridge
from autohete.units import Unit

_log = logging.getLogger("autohete")


class RunPlan:
    """Decides plans and brings the engine under them. Nothing may be in flight when it does.

    `plan` is what users see: None until the first step was measured.
    """

    def __init__(
        self, config: Config, units: list[Unit], bridge: OptimizerBridge, side: Side,
        engine: _C.Engine, cpu_mem: int,
    ) -> None:  # fmt: skip
        self._config = config
        self._units = units
        self._bridge = bridge
        self._side = side
        self._engine = engine
        self._cpu_mem = cpu_mem
        self.plan: Plan | None = None
        self.profile: _C.Profile | None = None
        self.placements: list[_C.UnitPlan] = []
        # Of every unit, as plain booleans: hooks ask many times a step.
        self._managed: list[bool] = []
        self._recomputed: list[bool] = []
        self._meter: StepMeter | None = None
        self.tracing = False  # the user wants the timeline to go on

    # ---------------------------------------------------------------- asked by the hooks

    def is_managed(self, index: int) -> bool:
        """Whether the engine moves anything of the unit."""
        return self._managed[index]

    def recomputes(self, index: int) -> bool:
        return self._recomputed[index]

    def measuring(self) -> StepMeter | None:
        """The meter, while the first step is being measured."""
        return None if self._meter is None or self._meter.complete else self._meter

    def begin_measuring_again(self) -> None:
        """The step that was being measured was left by an exception."""
        if self.measuring():
            self._meter = StepMeter(self._side, self._units)

    def is_measured(self) -> bool:
        """Whether a step was measured and nothing was decided from it yet."""
        return self._meter is not None and self._meter.complete

    # ---------------------------------------------------------------- deciding

    def start(self) -> None:
        """Apply the plan that was given, or the safest one, to be measured under.

        Raises:
            ValueError: the given plan is not one for this model.
            torch.OutOfMemoryError: its blocks do not fit.
        """
        given = self._config.plan
        if given is not None:
            plan = given if isinstance(given, Plan) else _plan_from_file(given)
            self._apply(plan)
            self.plan = plan
            self._side.set_advice(
                "Give more gpu_mem, a plan that offloads or recomputes more, or a smaller batch."
            )
            return
        self._apply(self._safest())
        self._meter = StepMeter(self._side, self._units)
        self._engine.record_timeline(True)
        self._side.set_advice(
            "This is the first step, under the plan that needs least; a smaller batch or shorter "
            "sequences need less."
        )

    def decide(self) -> None:
        """Make a plan from the measured step and apply it; stay where none is better."""
        self.profile = self._measured_profile()
        self.plan = self._safest()
        if not self._bridge.native:
            return
        try:
            plan = self._make_plan(self.profile)
            self._apply(plan)
        except InfeasibleError as error:
            # The safest plan has just run within the budget: the estimate is on the safe side.
            _log.warning("autohete: %s; going on with the plan of the first step", error)
            return
        except torch.OutOfMemoryError as error:
            _log.warning("autohete: %s; going on with the plan of the first step", error)
            self._apply(self.plan)
            return
        self.plan = plan
        self._advise(self.profile)
        self._side.reset_peak()
        _log.info("autohete: planned: %s", summarise_plan(plan))
        if self._config.profile_path is not None:
            save_profile(self._config.profile_path, self.profile, plan)

    def _make_plan(self, profile: _C.Profile) -> Plan:
        def made(gated: bool) -> Plan:
            profile.speculates = not gated and self._config.early_updates != "in_place"
            return make_plan(
                profile,
                self._side.plannable(),
                self._cpu_mem,
                strategy=self._config.strategy,
                window=self._config.window,
                gated=gated,
            )

        if self._config.strategy != "autohete" or not self._config.early_updates:
            return made(gated=True)
        try:
            return made(gated=False)
        except InfeasibleError:  # not with a second copy of the state on the host
            return made(gated=True)

    def _apply(self, plan: Plan) -> None:
        if len(plan.units) != len(self._units):
            raise ValueError(
                f"plan: it has {len(plan.units)} units, expected {len(self._units)} "
                f"(this model's); make a new plan for this model"
            )
        order = _C.policy_of(self._config.strategy)
        self._engine.configure(
            plan.units,
            plan.window,
            plan.chunk_bytes,
            priority_order=order.priority_order,
            synchronous_moves=order.synchronous_moves,
            barrier=order.iteration_barrier,
        )
        self._side.check_host_memory()
        self.placements = list(plan.units)
        self._managed = [unit.optimizer_state == Tier.HOST for unit in self.placements]
        self._recomputed = [
            unit.activations == ActivationRule.RECOMPUTE for unit in self.placements
        ]

    def _safest(self) -> Plan:
        plan = Plan()
        plan.strategy = "safest"
        plan.units = safest_plan(self._units, self._bridge.native)
        plan.window = self._config.window
        plan.chunk_bytes = self._config.chunk_bytes
        return plan

    def _measured_profile(self) -> _C.Profile:
        meter, self._meter = self._meter, None
        assert meter is not None
        engine = self._engine
        rates = lane_rates(engine.take_timeline(), self._num_updated()) | self._side.rates()
        engine.record_timeline(self.tracing)
        sizes = [
            (engine.param_bytes(i), engine.gradient_bytes(i), engine.state_bytes(i))
            for i in range(len(self._units))
        ]
        profile = build_profile(meter, self._units, sizes, rates)
        profile.gradient_accumulation_steps = self._config.gradient_accumulation_steps
        profile.chunk_bytes = self._config.chunk_bytes
        return profile

    def _num_updated(self) -> int:
        updates = self._bridge.updates
        return sum(p.numel() for unit in self._units for p in unit.parameters if updates(p))

    def _advise(self, profile: _C.Profile) -> None:
        least = minimum_gpu_mem(profile, self._cpu_mem, window=self._config.window)
        self._side.set_advice(
            f"For steps as the first one was, gpu_mem={least} bytes would fit; larger ones need "
            "more: give it, or smaller batches, or shorter sequences."
        )


def _plan_from_file(path: Any) -> Plan:
    plan = load_profile(path)[1]
    if plan is None:
        raise ValueError(f"plan: {path} holds a profile without a plan; make one with make_plan")
    return plan
