"""The plan a run is under: the safest one while the first step is measured, then the planner's.

Inputs larger than any measured before are measured anew, with every layer recomputed, and planned
for; smaller ones keep the placement and recompute no more than they must. See
docs/adr/0014-plans-follow-the-inputs.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from autohete import _C
from autohete.config import Config
from autohete.devices import Side
from autohete.distributed import Ranks
from autohete.exchange import GradientExchange
from autohete.kept_profile import KeptProfile
from autohete.layout import safest_plan
from autohete.measure import StepMeter
from autohete.measured_profile import build_profile, hardware_of, lane_rates
from autohete.planning import (
    ActivationRule,
    InfeasibleError,
    Plan,
    Tier,
    device_peak_bytes,
    device_visits,
    format_bytes,
    load_profile,
    make_plan,
    minimum_gpu_mem,
    summarise_plan,
)
from autohete.rank_plans import agree_on_plan, everywhere, merged_profile
from autohete.rank_rates import measured_rates, stated_rates
from autohete.rank_times import ExchangeTimes, Seen, refine
from autohete.recompute_rules import rules_for
from autohete.sized_profiles import Size, SizedProfiles, bucket_of, same_bytes, upper_of
from autohete.stepping import OptimizerBridge
from autohete.units import Unit
from autohete.warm_steps import WarmStep, WarmSteps

_log = logging.getLogger("autohete")
_RESERVE_PER_REFUSAL = 0.05  # of gpu_mem, left free after memory ran out under a plan that fits
# A plan that takes so much of the time of the one in use: steps were timed under that one, and on
# shared cores another is predicted to some percent only.
_WORTH_MOVING = 0.9
_TIMED_PLANS = 2  # at most, of those gone over to


class RunPlan:
    """Decides plans and brings the engine under them. Nothing may be in flight when it does.

    `plan` is None until the first step was measured; `in_use` is what users see.
    """

    def __init__(
        self, config: Config, units: list[Unit], bridge: OptimizerBridge, side: Side,
        engine: _C.Engine, cpu_mem: int, ranks: Ranks | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._units = units
        self._bridge = bridge
        self._side = side
        self._engine = engine
        self._cpu_mem = cpu_mem
        self._ranks = ranks
        self._exchange = exchange
        self._kept = KeptProfile(config.profile_path)
        self.plan: Plan | None = None
        self._first: Plan | None = None  # what the first step is measured under
        self.profile: _C.Profile | None = None
        self.placements: list[_C.UnitPlan] = []
        # Of every unit: hooks ask many times a step, and a binding's property takes microseconds.
        self._managed: list[bool] = []
        self._recomputed: list[bool] = []
        self.num_replans = 0
        self.replan_seconds = 0.0
        self._meter: StepMeter | None = None
        self._warm: WarmSteps | None = None
        self._num_timed = 0  # plans
        self._made_for = 0  # bytes of the device; on the rank that makes plans
        self._gated = True  # the plan in use was made for updates that start at step()
        self._hardware: _C.HardwareProfile | None = None
        self._rates: _C.RankProfile | None = None  # among the ranks
        self._seen: Seen = {}  # in steps under the plan in use
        self._sized = SizedProfiles()
        self._size: Size = ()
        """Of the inputs that are being measured."""
        self._rules: dict[Size, list[ActivationRule]] = {}
        self._rules_now: list[ActivationRule] | None = None  # those of `_rules` that are followed
        self._reserve = 0
        self._pressed = False
        self._refusals = 0
        self.tracing = False  # the user wants the timeline to go on

    @property
    def in_use(self) -> Plan | None:
        """The plan that was decided or given; before, the one that the first step runs under."""
        return self.plan or self._first

    # ---------------------------------------------------------------- asked by the hooks

    def is_managed(self, index: int) -> bool:
        """Whether the engine moves anything of the unit."""
        return self._managed[index]

    def recomputes(self, index: int) -> bool:
        return self._recomputed[index]

    def measuring(self) -> StepMeter | None:
        """The meter, while a first step is being measured or a later one timed."""
        if self._meter is None:
            return self._warm.timing() if self._warm else None
        return None if self._meter.complete else self._meter

    def measures_all(self) -> bool:
        """Whether a first step is being measured, under a plan that is for that."""
        return self._meter is not None and not self._meter.complete

    def left_by_an_exception(self) -> None:
        """A forward or backward ended early; for want of memory, maybe."""
        if self._warm:
            self._warm.left_by_an_exception()
        if self.measures_all():
            self._meter = self._new_meter()
        if self._follows_inputs():
            refusals = self._side.num_refusals()
            self._pressed = self._pressed or refusals > self._refusals
            self._refusals = refusals

    def _new_meter(self) -> StepMeter:
        exchange = self._exchange
        exchanged = (lambda: exchange.seconds) if exchange else None
        return StepMeter(self._side, self._units, self._engine, exchanged)

    def is_measured(self) -> bool:
        """Whether a step was measured or timed and nothing was decided from it yet."""
        timed = self._warm is not None and self._warm.are_over()
        return timed or (self._meter is not None and self._meter.complete)

    def time_a_step(self, size: Size, num_steps: int, goes_on: bool) -> None:
        """Time the pass that begins, where it is one to time.

        Args:
            num_steps: taken so far.
            goes_on: something of its step has run before it.
        """
        if self._warm and (goes_on or size == self._size):
            self._warm.forward_begins(num_steps, goes_on)

    def step_over(self, num_steps: int) -> None:
        """step() is about to return.

        Args:
            num_steps: taken so far.
        """
        if self._warm:
            self._warm.step_over(num_steps)

    def exchange_times(self) -> ExchangeTimes | None:
        """Return what the exchange of gradients reports to, while a step is timed."""
        return self._warm.exchange_times() if self._warm else None

    def watch(self) -> StepMeter:
        """Measure the next pass under the plan as it is; nothing is decided from it."""
        self._meter = self._new_meter()
        return self._meter

    def stop_watching(self) -> None:
        self._meter = None

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return per unit the bytes of parameters, gradients and optimizer state."""
        engine = self._engine
        return [
            (engine.param_bytes(i), engine.gradient_bytes(i), engine.state_bytes(i))
            for i in range(len(self._units))
        ]

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
            self._warn_of_its_peak(plan)
            self._apply(plan)
            self.plan = plan
            self._side.set_advice(
                "Give more gpu_mem, a plan that offloads or recomputes more, or a smaller batch."
            )
            return
        self._first = self._safest()
        self._apply(self._first)
        self._meter = self._new_meter()
        self._engine.record_timeline(True)
        self._side.set_advice(
            "This is the first step, under the plan that needs least; a smaller batch or shorter "
            "sequences need less."
        )

    def _warn_of_its_peak(self, plan: Plan) -> None:
        """A plan for less memory than it needs may still be used, with smaller batches."""
        peak, room = plan.device_peak_bytes, self._side.plannable()
        if peak > room:
            _log.warning(
                "autohete: plan: its device peak is %s (gpu_mem=%d), expected within gpu_mem of "
                "%s; steps as large as it was made for will run out of memory: give more gpu_mem, "
                "or make a plan for this one",
                format_bytes(peak), peak, format_bytes(room),
            )  # fmt: skip

    def decide(self, gradients_persist: bool, num_steps: int) -> bool:
        """Make a plan from the measured or timed step and apply it; stay where none is better.

        Of several ranks all call it, those too whose inputs brought nothing new.

        Args:
            gradients_persist: some are there when a forward begins.
            num_steps: taken so far.

        Returns: whether the plan is another one now.
        """
        first, timed = self.plan is None, False
        start = time.perf_counter()
        if self._meter is not None and self._meter.complete:
            self._absorb(gradients_persist)
        elif self._warm is not None and self._warm.are_over():
            self._absorb_seconds(self._warm)
            timed = True
        if first:
            self.plan = self._safest()
        changed = False
        if self._bridge.native and self._units:
            changed = self._plan_for_the_largest()
            is_new = first or (timed and changed and self._num_timed < _TIMED_PLANS)
            if is_new and self.plan is not None and self.plan.strategy != "safest":
                self._warm = WarmSteps(self._new_warm_step, num_steps)
                self._num_timed += 1
        if changed and not first:
            self.num_replans += 1
            self.replan_seconds += time.perf_counter() - start
        return changed

    def _absorb(self, gradients_persist: bool) -> None:
        """Turn what the meter saw into a profile for its size."""
        profile = self._measured_profile()
        profile.gradients_persist = (
            gradients_persist or self._config.gradient_accumulation_steps > 1
        )
        self._sized.add(self._size, profile)
        self._rules.clear()

    def _new_warm_step(self) -> WarmStep:
        return WarmStep(self._side, self._units, self._engine, self._exchange)

    def _absorb_seconds(self, warm: WarmSteps) -> None:
        self._warm, self._seen = None, warm.seen()
        if self._rates is not None:
            warm.refine_rates(self._rates)
        assert self.plan is not None
        profile = _C.Profile(self._sized.measured_at(self._size))
        profile.ranks = self._rates or profile.ranks
        self._sized.add(self._size, warm.refined(profile, self.plan))
        self._rules.clear()

    def _plan_for_the_largest(self) -> bool:
        """Return whether another plan is in use now."""
        profile = self._largest_profile()
        if self._ranks:
            profile.ranks = self._rates = self._rates or self._rates_among(self._ranks)
        before, self.profile = self.profile, merged_profile(self._ranks, profile)
        if self._ranks:
            self._refine_among(self._ranks, self.profile)
            self._rates = self.profile.ranks
        only_seconds = before is not None and same_bytes(before, self.profile)

        def make(profile: _C.Profile, plannable: int) -> Plan:
            plan, before = self._make_plan(profile, plannable), self._made_for
            self._made_for = plannable
            stays = only_seconds and plannable == before
            return self._stay_unless_worth_it(plan, profile) if stays else plan

        safest = self._safest()
        try:
            plan = self._agree(self.profile, make)
            if only_seconds and self._is_in_place_everywhere(plan):
                self.plan = plan
                _log.info(
                    "autohete: a later step was timed: %.3g s a step expected", plan.step_seconds
                )
                self._keep()
                return False
            everywhere(self._ranks, lambda: self._apply(plan))
        except InfeasibleError as error:
            # The safest plan has just run within the budget: the estimate is on the safe side.
            _log.warning("autohete: %s; going on with the plan of the first step", error)
            self._stay_safe(safest)
            return True
        except torch.OutOfMemoryError as error:
            _log.warning("autohete: %s; going on with the plan of the first step", error)
            self._stay_safe(safest)
            return True
        self.plan = plan
        self._advise(self.profile)
        self._refusals = self._side.num_refusals()
        self._side.reset_peak()
        _log.info("autohete: planned: %s", summarise_plan(plan))
        self._keep()
        return True

    def _is_in_place_everywhere(self, plan: Plan) -> bool:
        """Collective: what is kept is every rank's own business, so it may be on some only."""
        is_here = self.placements == list(plan.units)
        return self._ranks.all_of(is_here) if self._ranks else is_here

    def _keep(self) -> None:
        if self._ranks is None or self._ranks.rank == 0:
            assert self.profile is not None and self.plan is not None
            self._kept.write(self.profile, self.plan)

    def _stay_unless_worth_it(self, plan: Plan, profile: _C.Profile) -> Plan:
        """The plan in use, predicted anew, unless the other is shorter by more than noise."""
        if self.plan is None or self.plan.strategy != plan.strategy:
            return plan
        now, policy = Plan(self.plan), _C.policy_of(plan.strategy)
        policy.gated = policy.gated and self._gated
        _C.predict_plan(profile, now, policy)
        return plan if plan.step_seconds < _WORTH_MOVING * now.step_seconds else now

    def _agree(self, profile: _C.Profile, make: Callable[[_C.Profile, int], Plan]) -> Plan:
        """Make a plan with all ranks; where memory is short, for an exchange without overlap."""
        try:
            return agree_on_plan(self._ranks, profile, self._plannable(), make)
        except InfeasibleError:
            saved = self._exchange.do_without_overlap() if self._exchange else 0
            if not saved:
                raise
            profile.fixed_device_bytes -= saved
            self._sized.need_less(saved)
            return agree_on_plan(self._ranks, profile, self._plannable(), make)

    def _stay_safe(self, safest: Plan) -> None:
        if self.placements != list(safest.units):
            self._apply(safest)
        self.plan = safest

    def _largest_profile(self) -> _C.Profile:
        """What no inputs measured so far exceed."""
        profiles = [self._sized.measured_at(size) for size in self._sized.largest()]
        return reduce(upper_of, profiles)

    # ---------------------------------------------------------------- following the inputs

    def _follows_inputs(self) -> bool:
        return self._config.plan is None and self._bridge.native and self.plan is not None

    def needs_measuring(self, size: Size) -> bool:
        """Whether inputs of this size may need more than the plan was made for."""
        if self._pressed:
            return True
        if self.measures_all():
            return not self._follows_inputs()
        return self._follows_inputs() and not self._sized.covers(size)

    def measure_next(self, size: Size) -> None:
        """Bring the engine under a plan that this size's step can be measured under.

        Raises:
            torch.OutOfMemoryError: it will not fit under any.
        """
        self._size, self._warm = size, None
        if not self._follows_inputs():
            return  # the first step is under the safest plan as it is
        start = time.perf_counter()
        if self.is_measured():
            self._absorb(gradients_persist=True)
        if self._ranks:
            self._measure_where_it_is(size)
        elif self._pressed:
            self._pressed = False
            self._reserve += int(self._side.plannable() * _RESERVE_PER_REFUSAL)
            self._sized.forget(size)
            self._apply(self._safest())
        else:
            self._refuse_what_cannot_fit(size)
            self._recompute_everything(size)
        self._meter = self._new_meter()
        self.replan_seconds += time.perf_counter() - start

    def _measure_where_it_is(self, size: Size) -> None:
        """Of several ranks one cannot move anything by itself: recompute, and plan together next.

        What is kept is every rank's own business.
        """
        if self._pressed:
            self._pressed = False
            self._reserve += int(self._side.plannable() * _RESERVE_PER_REFUSAL)
            self._sized.forget(size)
        else:
            self._refuse_what_cannot_fit(size)
        self._recompute_layers(self.placements)
        self._place(self.placements)

    def _recompute_layers(self, placements: list[_C.UnitPlan]) -> None:
        for placed, unit in zip(placements, self._units, strict=True):
            if unit.is_layer:
                placed.activations = ActivationRule.RECOMPUTE

    def _refuse_what_cannot_fit(self, size: Size) -> None:
        least = self._sized.beyond(size, power=1)
        if least is None:
            return
        plan = self._safest()
        needed = max(v[2] for v in device_visits(least, plan, [0] * len(plan.units)))
        if needed > self._side.plannable():
            raise torch.OutOfMemoryError(
                f"autohete: inputs of {size} (items and longest side of each tensor) need about "
                f"{format_bytes(needed)} (gpu_mem={needed}) under the plan that needs least, "
                f"given {format_bytes(self._side.plannable())}; nothing was computed yet. Give "
                "more gpu_mem, smaller batches, or shorter sequences."
            )

    def _recompute_everything(self, size: Size) -> None:
        """Where that surely fits, nothing is moved for it."""
        assert self.plan is not None
        plan = Plan(self.plan)
        units = [_C.UnitPlan(unit) for unit in plan.units]
        self._recompute_layers(units)
        plan.units = units
        most = self._sized.beyond(size, power=2)
        if most is not None and device_peak_bytes(most, plan) <= self._side.plannable():
            self._place(units)
        else:
            self._apply(self._safest())

    def use_rules_for(self, size: Size) -> None:
        """Recompute only what inputs of this size must; the placement stays."""
        if not self._follows_inputs() or self.plan is None or self.plan.strategy != "autohete":
            return
        bucket = bucket_of(size)
        if not self._sized.covers(bucket):
            bucket = size
        rules = self._rules.get(bucket)
        if rules is None:
            rules = [unit.activations for unit in self.plan.units]
            profile = self._sized.at(bucket)
            if profile is not None and bucket not in self._sized.largest():
                rules = rules_for(profile, self.plan, self._plannable())
            self._rules[bucket] = rules
        if rules is self._rules_now:
            return
        self.use_rules(rules)
        self._rules_now = rules

    def use_rules(self, rules: list[ActivationRule]) -> None:
        """Keep or recompute each unit's activations from the next forward on."""
        for placed, rule in zip(self.placements, rules, strict=True):
            placed.activations = rule
        self._place(self.placements)

    def _place(self, placements: list[_C.UnitPlan]) -> None:
        self.placements = placements
        self._rules_now = None
        self._managed = [unit.optimizer_state == Tier.HOST for unit in placements]
        self._recomputed = [unit.activations == ActivationRule.RECOMPUTE for unit in placements]

    def _plannable(self) -> int:
        return max(self._side.plannable() - self._reserve, 1)

    def _make_plan(self, profile: _C.Profile, plannable: int) -> Plan:
        def made(gated: bool) -> Plan:
            self._gated = gated
            profile.speculates = not gated and self._config.early_updates != "in_place"
            return make_plan(
                profile,
                plannable,
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
        self._place([_C.UnitPlan(unit) for unit in plan.units])

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
        if self._hardware is None:
            rates = lane_rates(engine.take_timeline(), self._num_updated()) | self._side.rates()
            engine.record_timeline(self.tracing)
            self._hardware = hardware_of(rates)
        profile = build_profile(meter, self._units, self.sizes(), self._hardware)
        profile.gradient_accumulation_steps = self._config.gradient_accumulation_steps
        profile.chunk_bytes = self._config.chunk_bytes
        if self._exchange:
            profile.fixed_device_bytes += self._exchange.device_bytes()
        return profile

    def _rates_among(self, ranks: Ranks) -> _C.RankProfile:
        """Collective."""
        stated, own_rows = self._config.rank_bandwidth, not self._config.whole_gradients
        if stated is not None:
            return stated_rates(ranks, float(stated), own_rows)
        largest = max(zip(self.sizes(), self._units, strict=True), key=lambda pair: pair[0][1])[1]
        return measured_rates(ranks, self._side.torch_device, largest, own_rows)

    def _refine_among(self, ranks: Ranks, profile: _C.Profile) -> None:
        """Take up what timed steps show of waits for other ranks, if some were. Collective."""
        of_ranks, self._seen = ranks.gather(self._seen), {}
        if self.plan is not None:
            refine(profile, self.plan, of_ranks, rates=self._config.rank_bandwidth is None)

    def _num_updated(self) -> int:
        """Of several ranks, how many this one updates."""
        return sum(
            p.numel() if num_rows is None else num_rows * (p.numel() // len(p))
            for u, unit in enumerate(self._units)
            for i, p in enumerate(unit.parameters)
            if self._bridge.updates(p)
            for num_rows in (self._own_rows(u, i),)
        )

    def _own_rows(self, unit: int, parameter: int) -> int | None:
        is_shared, _, num_rows = self._engine.part(unit, parameter)
        return num_rows if is_shared else None

    def _advise(self, profile: _C.Profile) -> None:
        least = minimum_gpu_mem(profile, self._cpu_mem, window=self._config.window)
        self._side.set_advice(
            f"For steps as large as measured so far, {format_bytes(least)} (gpu_mem={least}) would "
            "fit; larger ones need more: give it, or smaller batches, or shorter sequences. The "
            "next step is measured again and planned with more to spare."
        )


def _plan_from_file(path: Any) -> Plan:
    plan = load_profile(path)[1]
    if plan is None:
        raise ValueError(f"plan: {path} holds a profile without a plan; make one with make_plan")
    return plan
