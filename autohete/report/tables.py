"""Tables for a terminal. They take plans and reports as they come; nothing is measured here."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from autohete.planning.sizes import format_bytes
from autohete.planning.table import plan_rows


def plan_table(plan: Any, profile: Any = None) -> Table:
    """Return one row per run of units that share a placement.

    Args:
        plan: an autohete Plan.
        profile: the Profile it was made from, for the units' names.
    """
    table = Table(title=f"plan ({plan.strategy})", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("units", "number", "activations", "parameters", "optimizer"):
        table.add_column(heading, justify="right" if heading == "number" else "left")
    for row in plan_rows(plan, profile):
        activations = "recomputed" if row.checkpointed else "kept"
        table.add_row(row.names, str(row.count), activations, row.parameters, row.optimizer)
    return table


def report_facts(report: Any) -> list[tuple[str, str]]:
    """Return the figures of `model.report()` in words; what was not predicted is left out."""
    steps = max(1, report.num_steps)
    bytes_facts = {
        "device memory: budget": report.device_budget_bytes,
        "device memory: predicted peak": report.device_peak_predicted_bytes,
        "device memory: measured peak": report.device_peak_measured_bytes,
        "host to device, per step": report.h2d_bytes / steps,
        "device to host, per step": report.d2h_bytes / steps,
    }
    seconds_facts = {
        "step time: predicted": report.step_seconds_predicted,
        "step time: measured (median)": report.step_seconds_measured,
    }
    facts = [(what, format_bytes(n)) for what, n in bytes_facts.items() if n is not None]
    facts += [(what, f"{s * 1e3:.0f} ms") for what, s in seconds_facts.items() if s is not None]
    return facts
