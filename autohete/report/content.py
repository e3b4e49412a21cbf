"""What one report is about: its title, its facts, and the data of its figures.

Made from a plan and its profile, from what plan_for() returned, or from what a run measured. The
figures come as Vega-Lite specifications by title, in the order in which they are shown.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autohete.planning import Plan, Profile, format_bytes, simulate
from autohete.report import rows as data
from autohete.report.tables import report_facts

if TYPE_CHECKING:
    from autohete.planning.plan_report import PlanReport
    from autohete.planning.sweep import SweepPoint
    from autohete.report.charts import Spec

PLACEMENT = "What lives where"
DEVICE = "Device memory over one step"
HOST = "Host memory over one step"
TIMELINE = "The lanes over two steps"
BATCHES = "Tokens per second by batch"
BUDGETS = "Tokens per second by device memory"
# The planner's names, in the order of data.LANES.
_BINDING = ("compute", "h2d", "d2h", "cpu", "exchange", "gather")


@dataclass
class Content:
    """Everything that a page or a picture shows. None and empty where nothing is known."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    plan: Plan | None = None
    profile: Profile | None = None
    simulation: Any = None
    gpu_mem: int | None = None
    cpu_mem: int | None = None
    unit_names: list[str] = field(default_factory=list)
    spans: list[data.Span] = field(default_factory=list)
    """Measured."""
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    host_peak: int | None = None
    passes: int = 1
    batches: list[SweepPoint] = field(default_factory=list)
    budgets: list[SweepPoint] = field(default_factory=list)

    def figures(self) -> dict[str, Spec]:
        """Return the figures there is data for.

        Raises:
            RuntimeError: the plotting library is missing.
        """
        charts = plotting()
        found: dict[str, Spec] = {}
        if self.plan is not None and self.plan.units:
            found[PLACEMENT] = charts.placement_chart(self._placement())
        if device := self._memory(host=False):
            found[DEVICE] = charts.memory_chart(device, self.gpu_mem, "on the device")
        if host := self._memory(host=True):
            found[HOST] = charts.memory_chart(host, self.cpu_mem, "on the host")
        if timeline := self._timeline():
            found[TIMELINE] = charts.timeline_chart(timeline)
        if fitting := _sweep_rows(self.batches, 1):
            found[BATCHES] = charts.sweep_chart(fitting, "batch", doubling=True)
        if fitting := _sweep_rows(self.budgets, 2**30):
            found[BUDGETS] = charts.sweep_chart(fitting, "GiB of device memory")
        return found

    # ---------------------------------------------------------------- rows

    def _placement(self) -> list[data.Row]:
        assert self.plan is not None
        rows = data.placement_rows(self.plan, self.profile)
        for row in rows if self.profile is None and self.unit_names else ():
            row["name"] = self.unit_names[row["unit"]]
        return rows

    def _names(self) -> list[str]:
        return self.unit_names or [u.name for u in (self.profile.units if self.profile else [])]

    def _memory(self, host: bool) -> list[data.Row]:
        rows: list[data.Row] = []
        if self.simulation is not None and self.profile is not None and self.plan is not None:
            device = data.predicted_memory(self.profile, self.plan, self.simulation)
            length = max((row["ms"] for row in device), default=0.0)
            on_host = data.constant_memory("predicted", self.plan.host_bytes, length)
            rows += on_host if host else device
        window = data.last_steps(self.spans, self.passes, count=1)
        return rows + data.measured_memory(self.samples, window, host)

    def _timeline(self) -> list[data.Row]:
        rows: list[data.Row] = []
        names = self._names()
        if self.spans:
            window = data.last_steps(self.spans, self.passes)
            rows += data.timeline_rows(self.spans, names, "measured", window)
        if self.simulation is not None:
            spans = data.simulated_spans(self.simulation)
            window = data.last_steps(spans, self.passes)
            rows += data.timeline_rows(spans, names, "predicted", window)
        return rows


def plotting() -> Any:
    """Return the module that draws.

    Raises:
        RuntimeError: the plotting library is missing.
    """
    try:
        importlib.import_module("vl_convert")
        return importlib.import_module("autohete.report.charts")
    except ImportError as error:
        raise RuntimeError(
            f"figures: the plotting library is missing ({error}), expected Altair and vl-convert; "
            "pip install altair vl-convert-python"
        ) from error


def content_of_plan(
    plan: Plan, profile: Profile | None = None, *, gpu_mem: int | None = None,
    cpu_mem: int | None = None, title: str = "autohete: a plan",
) -> Content:  # fmt: skip
    """Return what is to be said of a plan; with its profile also what is predicted of it."""
    facts = [
        ("strategy", plan.strategy),
        ("device memory: predicted peak", format_bytes(plan.device_peak_bytes)),
        ("host memory: predicted", format_bytes(plan.host_bytes)),
        ("step time: predicted", f"{plan.step_seconds * 1e3:.1f} ms"),
        ("bound by", plan.binding_lane or "nothing known"),
    ]
    return Content(
        title,
        facts if plan.step_seconds else facts[:1],
        plan,
        profile,
        None if profile is None else simulate(profile, plan),
        gpu_mem=gpu_mem,
        cpu_mem=cpu_mem,
        passes=1 if profile is None else profile.gradient_accumulation_steps,
    )


def content_of_plan_report(report: PlanReport) -> Content:
    """Return what plan_for() found; sweeps can be added to it."""
    described = report.description
    content = content_of_plan(
        report.plan,
        report.profile,
        gpu_mem=report.gpu_mem,
        cpu_mem=report.cpu_mem,
        title=f"{report.model} on {report.machine.name}",
    )
    content.facts = [
        ("model", f"{report.model}, {described.num_parameters / 1e9:.2f}B parameters"),
        ("machine", report.machine.name),
        ("batch", f"{described.batch} x {described.seq} tokens, {described.precision}"),
        ("tokens per second: predicted", f"{report.tokens_per_second:,.0f}"),
        ("MFU: predicted", f"{report.mfu:.1%}"),
        *content.facts,
    ]
    return content


def content_of_sweep(over: str, points: list[SweepPoint]) -> Content:
    """Return a sweep over "batch" or "gpu_mem" by itself.

    Raises:
        ValueError: none of its points fits, so there is nothing to draw.
    """
    first = next((point.report for point in points if point.report is not None), None)
    if first is None:
        raise ValueError(
            "figure: no point of the sweep fits, expected at least one; give more memory or a "
            "smaller model"
        )
    content = Content(f"{first.model} on {first.machine.name}")
    if over == "batch":
        content.batches = points
    else:
        content.budgets = points
    return content


def content_of_run(report: Any, title: str = "autohete: a run") -> Content:
    """Return what `model.report()` holds."""
    details = report.details
    facts = [("steps", str(report.num_steps)), *report_facts(report)]
    if details is None:
        return Content(title, facts)
    known = details.plan is not None and details.profile is not None
    return Content(
        title,
        facts,
        details.plan,
        details.profile,
        simulate(details.profile, details.plan) if known else None,
        gpu_mem=report.device_budget_bytes,
        cpu_mem=report.host_budget_bytes,
        unit_names=details.unit_names,
        spans=[data.Span(lane, u, what, b, e) for lane, u, what, b, e, _ in details.spans],
        samples=details.samples,
        passes=details.passes,
    )


def _sweep_rows(points: list[SweepPoint], scale: float) -> list[data.Row]:
    """Rows of a sweep's points that fit; `scale` is the axis's unit."""
    rows = []
    for point in points:
        figures = point.to_dict()
        if not figures["fits"]:
            continue
        is_batch = scale == 1
        rows.append(
            {
                "x": point.value / scale,
                "label": f"batch {point.value}" if is_batch else format_bytes(point.value),
                "tokens per second": round(figures["tokens_per_second"], 1),
                "step": f"{figures['step_seconds']:.3f} s",
                "MFU": f"{figures['mfu']:.1%}",
                "device": format_bytes(figures["device_peak_bytes"]),
                "host": format_bytes(figures["host_bytes"]),
                "bound by": data.LANES[_BINDING.index(figures["binding_lane"])],
            }
        )
    return rows
