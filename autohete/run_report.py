"""What a run did: budgets, predictions and measurements side by side; the timeline as a trace."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from autohete.planning import Plan, Profile, format_bytes
from autohete.run_trace import Sample, Span

if TYPE_CHECKING:
    from autohete.run import Run

_FAR = 1.5  # measured over predicted, or the other way round, that is worth a word
LANES = ("compute", "H2D", "D2H", "CPU")


@dataclass(frozen=True)
class RunDetails:
    """What the pictures of a run are drawn from."""

    unit_names: list[str]
    plan: Plan | None = None
    profile: Profile | None = None
    spans: list[Span] = field(default_factory=list)
    """Of the trace, if one is on."""
    samples: list[Sample] = field(default_factory=list)
    passes: int = 1
    """Forward passes of one step."""


@dataclass(frozen=True)
class RunReport:
    """Figures of the run so far, bytes and seconds; None where nothing is known."""

    num_steps: int
    strategy: str | None
    device_budget_bytes: int
    device_peak_predicted_bytes: int | None
    device_peak_measured_bytes: int
    """Since the plan in use began."""
    host_budget_bytes: int
    host_peak_measured_bytes: int
    step_seconds_predicted: float | None
    step_seconds_measured: float | None
    """Median, first step and plan change left out."""
    h2d_bytes: int
    d2h_bytes: int
    slot_misses: int
    wait_update_seconds: float
    wait_upload_seconds: float
    wait_gradients_seconds: float
    step_seconds_last: float | None = None
    updates_ahead: int = 0
    """Units updated before step(), of all updates."""
    compute_share: float | None = None
    """Of the time since the plan in use began: not waiting for the engine."""
    h2d_share: float | None = None
    """Likewise: copying to the device; to the host; updating on the CPU."""
    d2h_share: float | None = None
    cpu_share: float | None = None
    num_replans: int = 0
    """Plans made after the first one: for larger inputs, after memory had run out, or as later
    steps took other times than the first."""
    replan_seconds: float = 0.0
    """What they took, moving included; the steps measured for them are steps like any other."""
    details: RunDetails | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, run: Run) -> RunReport:
        counters = run.engine.counters()
        plan = run.plan
        shares: dict[str, Any] = {**run.lane_shares()}
        return cls(
            num_steps=run.num_steps,
            strategy=plan.strategy if plan else None,
            device_budget_bytes=run.gpu_mem,
            device_peak_predicted_bytes=(plan.device_peak_bytes or None) if plan else None,
            device_peak_measured_bytes=run.side.peak(),
            host_budget_bytes=run.cpu_mem,
            host_peak_measured_bytes=run.side.host_peak(),
            step_seconds_predicted=(plan.step_seconds or None) if plan else None,
            step_seconds_measured=median(run.step_seconds) if run.step_seconds else None,
            step_seconds_last=run.step_seconds[-1] if run.step_seconds else None,
            num_replans=run.plans.num_replans,
            replan_seconds=run.plans.replan_seconds,
            updates_ahead=counters["updates_ahead"],
            **shares,
            details=_details_of(run),
            **{
                k: counters[k]
                for k in (
                    "h2d_bytes",
                    "d2h_bytes",
                    "slot_misses",
                    "wait_update_seconds",
                    "wait_upload_seconds",
                    "wait_gradients_seconds",
                )
            },
        )

    def figures(self) -> dict[str, Any]:
        """Return every figure by its name, without the details."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "details"}

    def metrics(self) -> dict[str, float]:
        """Return the figures that are numbers, named for a logger: "autohete/h2d_bytes", ..."""
        waits = ("wait_update_seconds", "wait_upload_seconds", "wait_gradients_seconds")
        numbers = {
            f"autohete/{name}": float(value)
            for name, value in self.figures().items()
            if isinstance(value, (int, float))
        }
        return numbers | {"autohete/waited_seconds": sum(getattr(self, name) for name in waits)}

    def _strategy(self) -> str:
        return f"strategy {self.strategy}" if self.strategy else "not planned yet"

    def _apart(self) -> list[str]:
        """One line where prediction and measurement differ by more than _FAR, and what it means."""
        predicted, measured = self.step_seconds_predicted, self.step_seconds_measured
        if not predicted or not measured or 1 / _FAR <= measured / predicted <= _FAR:
            return []
        if measured < predicted:
            why = (
                f"steps took {measured / predicted:.2f} of the time predicted: usually the step "
                "that was measured for the plan was slow, by its warm-up or a busy machine"
            )
        else:
            why = (
                f"steps took {measured / predicted:.1f} times as long as predicted: usually the "
                "machine is busier than while the plan's step was measured, or the plan is not "
                "from here"
            )
        return [f"                 {why}; a new run measures again"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, and the trace if one is on, to a file for `autohete report`."""
        from autohete.run_file import save_run

        save_run(path, self)

    def _repr_html_(self) -> str:
        from autohete.report.notebook import report_html

        return report_html(self)

    def __str__(self) -> str:
        def size(value: int | None) -> str:
            return "-" if value is None else format_bytes(value)

        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f} s"

        return "\n".join(
            (
                f"steps            {self.num_steps} ({self._strategy()})",
                f"device memory    budget {size(self.device_budget_bytes)}, predicted "
                f"{size(self.device_peak_predicted_bytes)}, measured "
                f"{size(self.device_peak_measured_bytes)}",
                f"host memory      budget {size(self.host_budget_bytes)}, measured "
                f"{size(self.host_peak_measured_bytes)}",
                f"step time        predicted {seconds(self.step_seconds_predicted)}, measured "
                f"{seconds(self.step_seconds_measured)}",
                f"moved            {size(self.h2d_bytes)} to the device, {size(self.d2h_bytes)} "
                "to the host",
                f"waited           {self.wait_update_seconds:.3f} s for updates, "
                f"{self.wait_upload_seconds:.3f} s for uploads, "
                f"{self.wait_gradients_seconds:.3f} s for gradients",
                *(
                    [
                        f"lanes busy       compute {self.compute_share:.0%}, to the device "
                        f"{self.h2d_share:.0%}, to the host {self.d2h_share:.0%}, CPU "
                        f"{self.cpu_share:.0%}; {self.updates_ahead} units updated before step()"
                    ]
                    if self.compute_share is not None
                    else []
                ),
                *self._apart(),
                *(
                    [f"planned again    {self.num_replans} times, {self.replan_seconds:.3f} s"]
                    if self.num_replans
                    else []
                ),
            )
        )


def _details_of(run: Run) -> RunDetails:
    trace = run.trace
    return RunDetails(
        unit_names=[unit.name for unit in run.units],
        plan=run.plan,
        profile=run.profile,
        spans=trace.spans() if trace else [],
        samples=list(trace.samples) if trace else [],
        passes=run.config.gradient_accumulation_steps,
    )


def chrome_trace(spans: list[tuple[Any, ...]], unit_names: list[str]) -> dict[str, Any]:
    """Return the spans in the Trace Event Format, which Chrome and Perfetto open."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(LANES)
    ]
    start = min((span[3] for span in spans), default=0.0)
    for lane, unit, what, begin, end, num_bytes in spans:
        name = f"{what} {unit_names[unit]}" if 0 <= unit < len(unit_names) else what
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lane,
                "name": name,
                "ts": (begin - start) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"bytes": num_bytes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
