"""The other systems' placements, planned and predicted in our terms (see docs/planning.md).

Each strategy offers a few placements; of those that fit, the one with the shortest simulated step
under the strategy's own order of work is its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autohete import _C

STRATEGIES = (
    "autohete",
    "zero_offload",
    "patrickstar",
    "stronghold",
    "device_only",
    "offload_everything",
)
Units = list[_C.UnitPlan]
Fits = Callable[[Units], bool]


def plan_strategy(
    strategy: str,
    profile: _C.Profile,
    budgets: _C.Budgets,
    options: _C.PlannerOptions,
    *,
    recompute: tuple[bool, ...] = (False, True),
) -> _C.Plan:
    """Return the plan of a strategy other than "autohete".

    Args:
        recompute: what may be chosen, for all layers at once. device_only recomputes none.

    Raises:
        InfeasibleError: none of its placements fits; it names the needs of the smallest one.
    """

    def as_plan(units: Units) -> _C.Plan:
        plan = _C.Plan()
        plan.units = units
        plan.strategy, plan.solver = strategy, "rule"
        plan.window, plan.chunk_bytes = options.window, profile.chunk_bytes
        return plan

    def fits(units: Units) -> bool:
        plan = as_plan(units)
        return (
            _C.device_peak_bytes(profile, plan) <= budgets.device_bytes
            and _C.host_bytes(profile, plan) <= budgets.host_bytes
        )

    policy = _C.policy_of(strategy)
    policy.early_uploads = options.early_uploads
    plans = [as_plan(units) for units in _PLACEMENTS[strategy](profile, fits, recompute)]
    for plan in plans:
        _C.predict_plan(profile, plan, policy)
    fitting = [plan for plan in plans if fits(plan.units)]
    if not fitting:
        smallest = min(plans, key=lambda p: _C.device_peak_bytes(profile, p))
        _C.require_within(profile, smallest, budgets)
    return min(fitting, key=lambda plan: plan.step_seconds)


def _place(profile: _C.Profile, *, state: int, parameters: int, recompute: bool) -> Units:
    """Last `state` units with state on the host, last `parameters` of them with parameters too."""
    count = len(profile.units)
    units: Units = []
    for i, described in enumerate(profile.units):
        unit = _C.UnitPlan()
        if i >= count - state:
            unit.gradients = unit.optimizer_state = _C.Tier.HOST
            if i >= count - parameters and described.can_offload_parameters:
                unit.parameters = _C.Tier.HOST
        if recompute and described.can_recompute:
            unit.activations = _C.ActivationRule.RECOMPUTE
        units.append(unit)
    return units


def _smallest(count: int, place: Callable[[int], Units], fits: Fits) -> Units:
    """The placement with the smallest number in 0 .. count that fits; the largest if none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if fits(place(middle)):
            high = middle
        else:
            low = middle + 1
    return place(low)


def _device_only(profile: _C.Profile, fits: Fits, choices: tuple[bool, ...]) -> Iterator[Units]:
    yield _place(profile, state=0, parameters=0, recompute=False)


def _zero_offload(profile: _C.Profile, fits: Fits, choices: tuple[bool, ...]) -> Iterator[Units]:
    for recompute in choices:
        yield _place(profile, state=len(profile.units), parameters=0, recompute=recompute)


def _patrickstar(profile: _C.Profile, fits: Fits, choices: tuple[bool, ...]) -> Iterator[Units]:
    count = len(profile.units)
    for recompute in choices:
        yield _smallest(
            2 * count,  # first the optimizer chunks leave one by one, then the parameters
            lambda k: _place(
                profile,
                state=min(k, count),
                parameters=max(0, k - count),
                recompute=recompute,  # noqa: B023  (called within this turn of the loop)
            ),
            fits,
        )


def _stronghold(profile: _C.Profile, fits: Fits, choices: tuple[bool, ...]) -> Iterator[Units]:
    for recompute in choices:
        yield _smallest(
            len(profile.units),
            lambda k: _place(profile, state=k, parameters=k, recompute=recompute),  # noqa: B023
            fits,
        )


def _offload_everything(
    profile: _C.Profile, fits: Fits, choices: tuple[bool, ...]
) -> Iterator[Units]:
    count = len(profile.units)
    for recompute in choices:
        yield _place(profile, state=count, parameters=count, recompute=recompute)


_PLACEMENTS: dict[str, Callable[[_C.Profile, Fits, tuple[bool, ...]], Iterator[Units]]] = {
    "zero_offload": _zero_offload,
    "patrickstar": _patrickstar,
    "stronghold": _stronghold,
    "device_only": _device_only,
    "offload_everything": _offload_everything,
}
