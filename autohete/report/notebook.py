"""How plans, simulations and reports look in a notebook: facts, figures as inline pictures.

The pictures take the page's text colour, so they suit light and dark, and need no scripts: a saved
notebook shows them without being run or trusted. Without the plotting library there is the table.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from autohete import _C
from autohete.planning import Plan, format_plan
from autohete.report.content import (
    Content,
    content_of_plan,
    content_of_plan_report,
    content_of_run,
    plotting,
)

if TYPE_CHECKING:
    from autohete.planning.plan_report import PlanReport


def plan_html(plan: Plan) -> str:
    """Return a plan's table and its strip; a plan does not know its units' names."""
    return _html(content_of_plan(plan), format_plan(plan))


def plan_report_html(report: PlanReport) -> str:
    """Return what plan_for() found: facts, strip, memory and lanes."""
    return _html(content_of_plan_report(report))


def simulation_html(simulation: _C.Simulation) -> str:
    """Return a simulation's figures, and its lanes where spans were kept."""
    busy = simulation.compute_seconds / simulation.step_seconds
    facts = [
        ("step time", f"{simulation.step_seconds * 1e3:.1f} ms"),
        ("device busy", f"{busy:.0%}"),
        ("first step", f"{simulation.first_step_seconds * 1e3:.1f} ms"),
    ]
    content = Content("", facts, simulation=simulation if simulation.spans else None)
    return _html(content)


def report_html(report: Any) -> str:
    """Return what `model.report()` shows."""
    return _html(content_of_run(report))


def _html(content: Content, text: str = "") -> str:
    parts = [_table(content.facts)]
    if text:
        parts.append(f"<pre>{html.escape(text)}</pre>")
    try:
        plotting()
    except RuntimeError as missing:
        return "".join([*parts, f"<p><small>{html.escape(str(missing))}</small></p>"])
    from autohete.report.pictures import svg_text

    for title, spec in content.figures().items():
        parts.append(
            f"<figure><figcaption>{html.escape(title)}</figcaption>{svg_text(spec)}</figure>"
        )
    return f'<div class="autohete">{"".join(parts)}</div>'


def _table(facts: list[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(figure)}</td></tr>"
        for what, figure in facts
    )
    return f"<table>{rows}</table>"
