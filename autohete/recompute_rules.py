"""How much has to be recomputed under a given placement."""

from __future__ import annotations

from autohete import _C
from autohete.planning import ActivationRule, device_peak_bytes


def rules_for(profile: _C.Profile, plan: _C.Plan, gpu_mem: int) -> list[ActivationRule]:
    """Return the activation rules that recompute the fewest of the plan's recomputed units and fit.

    The first units are the ones that go on being recomputed, as in the planner's own plans. Where
    nothing less fits the rules are the plan's.
    """
    recomputed = [
        index
        for index, unit in enumerate(plan.units)
        if unit.activations == ActivationRule.RECOMPUTE
    ]
    low, high = 0, len(recomputed)
    while low < high:
        middle = (low + high) // 2
        if device_peak_bytes(profile, _with(plan, recomputed[:middle])) <= gpu_mem:
            high = middle
        else:
            low = middle + 1
    return [unit.activations for unit in _with(plan, recomputed[:low]).units]


def _with(plan: _C.Plan, recomputed: list[int]) -> _C.Plan:
    other = _C.Plan(plan)
    units = [_C.UnitPlan(unit) for unit in plan.units]
    for index, unit in enumerate(units):
        again = index in recomputed
        unit.activations = ActivationRule.RECOMPUTE if again else ActivationRule.KEEP
    other.units = units
    return other
