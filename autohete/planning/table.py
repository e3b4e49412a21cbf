"""A plan as rows for people: one row per run of units of one kind with one placement."""

from __future__ import annotations

from dataclasses import dataclass

from autohete import _C
from autohete.planning.sizes import format_bytes


@dataclass(frozen=True)
class PlanRow:
    """Units `first` .. `last` (positions), named from `first_name` to `last_name`."""

    first: int
    last: int
    first_name: str
    last_name: str
    checkpointed: bool
    parameters: str  # "device" or "host"
    optimizer: str  # "device" or "host": where the state is and the update runs

    @property
    def count(self) -> int:
        """How many units."""
        return self.last - self.first + 1

    @property
    def names(self) -> str:
        """The range of names, e.g. "h.0 .. h.11"."""
        return self.first_name if self.count == 1 else f"{self.first_name} .. {self.last_name}"


def plan_rows(plan: _C.Plan, profile: _C.Profile | None = None) -> list[PlanRow]:
    """Return the plan's rows in forward order; without a profile units are named by position."""
    units = plan.units
    if profile is None:
        names, kinds = [str(i) for i in range(len(units))], [""] * len(units)
    else:
        _C.validate_plan(profile, plan)
        names = [unit.name for unit in profile.units]
        kinds = [unit.kind for unit in profile.units]
    rows: list[PlanRow] = []
    start = 0
    for end in range(1, len(units) + 1):
        if end < len(units) and units[end] == units[start] and kinds[end] == kinds[start]:
            continue
        rows.append(_row(units[start], start, end - 1, names))
        start = end
    return rows


def _row(unit: _C.UnitPlan, first: int, last: int, names: list[str]) -> PlanRow:
    return PlanRow(
        first=first,
        last=last,
        first_name=names[first],
        last_name=names[last],
        checkpointed=unit.activations == _C.ActivationRule.RECOMPUTE,
        parameters="host" if unit.parameters == _C.Tier.HOST else "device",
        optimizer="host" if unit.optimizer_state == _C.Tier.HOST else "device",
    )


def summarise_plan(plan: _C.Plan) -> str:
    """Return the plan in one line, for a log."""
    units = plan.units
    state = sum(u.optimizer_state == _C.Tier.HOST for u in units)
    parameters = sum(u.parameters == _C.Tier.HOST for u in units)
    recomputed = sum(u.activations == _C.ActivationRule.RECOMPUTE for u in units)
    return (
        f"{plan.strategy}: of {len(units)} units {state} keep their state on the host, "
        f"{parameters} their parameters, {recomputed} are recomputed; "
        f"device {format_bytes(plan.device_peak_bytes)}, host {format_bytes(plan.host_bytes)}, "
        f"step {plan.step_seconds * 1e3:.1f} ms, bound by {plan.binding_lane or 'nothing known'}"
    )


def format_plan(plan: _C.Plan, profile: _C.Profile | None = None) -> str:
    """Return the plan as a table in plain text."""
    header = ("units", "number", "activations", "parameters", "optimizer")
    lines = [header] + [
        (
            row.names,
            str(row.count),
            "recomputed" if row.checkpointed else "kept",
            row.parameters,
            row.optimizer,
        )
        for row in plan_rows(plan, profile)
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in lines
    ]
    text.append(f"strategy {plan.strategy}, window {plan.window}, {_predicted(plan)}")
    return "\n".join(text)


def _predicted(plan: _C.Plan) -> str:
    if plan.strategy == "safest" and not plan.step_seconds:
        return (
            "least device memory; the first step is measured under it, the others run under it "
            "only where the planner has no plan of its own"
        )
    return (
        f"device {format_bytes(plan.device_peak_bytes)}, host {format_bytes(plan.host_bytes)}, "
        f"step {plan.step_seconds * 1e3:.1f} ms, bound by {plan.binding_lane or 'nothing known'}"
    )
