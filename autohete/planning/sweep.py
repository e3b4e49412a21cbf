"""Sweeps: the same question for many batches or many device memories."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autohete import _C
from autohete.planning.make_plan import Size, minimum_gpu_mem
from autohete.planning.named_model import built_once
from autohete.planning.plan_report import PlanReport, plan_for, plan_report
from autohete.planning.sizes import format_bytes

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NUM_MEMORIES = 8


@dataclass(frozen=True)
class SweepPoint:
    """One setting: its report, or the smallest gpu_mem that it would need."""

    value: int
    """Samples for a sweep over the batch, bytes for one over gpu_mem."""
    report: PlanReport | None
    smallest_gpu_mem: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values; null where there is no plan."""
        report = self.report
        if report is None:
            return {"value": self.value, "fits": False, "smallest_gpu_mem": self.smallest_gpu_mem}
        units = report.plan.units
        return {
            "value": self.value,
            "fits": True,
            "step_seconds": report.plan.step_seconds,
            "tokens_per_second": report.tokens_per_second,
            "mfu": report.mfu,
            "device_peak_bytes": report.plan.device_peak_bytes,
            "host_bytes": report.plan.host_bytes,
            "binding_lane": report.plan.binding_lane,
            "state_on_host": sum(u.optimizer_state == _C.Tier.HOST for u in units),
            "parameters_on_host": sum(u.parameters == _C.Tier.HOST for u in units),
            "recomputed": sum(u.activations == _C.ActivationRule.RECOMPUTE for u in units),
            "units": len(units),
        }


def sweep_batch(model: str | Any, gpu: str, seq: int, **choices: Any) -> list[SweepPoint]:
    """Plan for growing batches, up to the first that does not fit; see plan_for()."""
    points = []
    model = built_once(model)
    for batch in BATCHES:
        try:
            report = plan_for(model, gpu, batch, seq, suggest=False, **choices)
        except _C.InfeasibleError as error:
            points.append(SweepPoint(batch, None, getattr(error, "smallest_gpu_mem")))  # noqa: B009
            break
        points.append(SweepPoint(batch, report))
    return points


def sweep_gpu_mem(
    model: str | Any, gpu: str, batch: int, seq: int, *, gpu_mem: Size | None = None, **choices: Any
) -> list[SweepPoint]:
    """Plan from the smallest device memory that fits up to `gpu_mem`, in even steps."""
    whole = plan_for(model, gpu, batch, seq, gpu_mem=gpu_mem, suggest=False, **choices)
    least = minimum_gpu_mem(whole.profile, whole.cpu_mem)
    step = max(0, whole.gpu_mem - least) / (NUM_MEMORIES - 1)
    points = []
    for i in range(NUM_MEMORIES):
        memory = whole.gpu_mem if i == NUM_MEMORIES - 1 else int(least + i * step)
        try:
            report = plan_report(replace(whole, gpu_mem=memory))
        except _C.InfeasibleError as error:  # a strategy that needs more than the least
            points.append(SweepPoint(memory, None, getattr(error, "smallest_gpu_mem")))  # noqa: B009
            continue
        points.append(SweepPoint(memory, report))
    return points


def format_sweep(over: str, points: list[SweepPoint]) -> str:
    """Return one line per point."""
    lines = [
        f"{over:>10}{'step':>11}{'tokens/s':>11}{'MFU':>7}{'device':>11}{'host':>11}"
        f"{'recomputed':>12}{'state off':>11}{'params off':>12}  bound by"
    ]
    for point in points:
        value = format_bytes(point.value) if over == "gpu_mem" else str(point.value)
        figures = point.to_dict()
        if not figures["fits"]:
            need = format_bytes(point.smallest_gpu_mem)
            lines.append(f"{value:>10}  does not fit; it needs {need} of device memory")
            continue
        lines.append(
            f"{value:>10}{figures['step_seconds']:>9.3f} s{figures['tokens_per_second']:>11,.0f}"
            f"{figures['mfu']:>7.1%}{format_bytes(figures['device_peak_bytes']):>11}"
            f"{format_bytes(figures['host_bytes']):>11}{figures['recomputed']:>12}"
            f"{figures['state_on_host']:>11}{figures['parameters_on_host']:>12}"
            f"  {figures['binding_lane']}"
        )
    return "\n".join(lines)
