"""Strategies side by side: each planned within the same budgets and simulated in its own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autohete import _C
from autohete.planning.make_plan import Size, make_plan
from autohete.planning.simulate import ABLATIONS, simulate
from autohete.planning.sizes import format_bytes
from autohete.planning.strategies import STRATEGIES


@dataclass(frozen=True)
class StrategyResult:
    """One strategy's plan, or why it has none."""

    strategy: str
    plan: _C.Plan | None
    reason: str = ""
    smallest_gpu_mem: int = 0
    """Set where there is no plan."""


def compare_strategies(
    profile: _C.Profile,
    gpu_mem: Size,
    cpu_mem: Size | None = None,
    *,
    strategies: tuple[str, ...] = STRATEGIES,
    gated: bool = True,
) -> list[StrategyResult]:
    """Plan with each strategy; `gated` holds for "autohete" (see make_plan())."""
    results = []
    for strategy in strategies:
        try:
            plan = make_plan(profile, gpu_mem, cpu_mem, strategy, gated=gated)
        except _C.InfeasibleError as error:
            # Set by the native module, where stubs cannot see it.
            smallest: int = getattr(error, "smallest_gpu_mem")  # noqa: B009
            results.append(StrategyResult(strategy, None, str(error), smallest))
        else:
            results.append(StrategyResult(strategy, plan))
    return results


def compare_ablations(
    profile: _C.Profile, gpu_mem: Size, cpu_mem: Size | None = None, *, gated: bool = True
) -> list[StrategyResult]:
    """Return autohete's plan simulated without each of `ABLATIONS`; empty when nothing fits."""
    try:
        plan = make_plan(profile, gpu_mem, cpu_mem, gated=gated)
    except _C.InfeasibleError:
        return []
    results = []
    for ablation in ABLATIONS:
        without = _C.Plan(plan)
        simulated = simulate(profile, plan, gated=gated, without=(ablation,), keep_spans=False)
        without.step_seconds = simulated.step_seconds
        results.append(StrategyResult(f"  without {ablation}", without))
    return results


def results_to_dict(results: list[StrategyResult]) -> list[dict[str, Any]]:
    """Return the results as plain JSON values; step_seconds is None where nothing fits."""
    return [
        {
            "strategy": result.strategy.strip(),
            "step_seconds": None if result.plan is None else result.plan.step_seconds,
            "device_peak_bytes": None if result.plan is None else result.plan.device_peak_bytes,
            "host_bytes": None if result.plan is None else result.plan.host_bytes,
            "smallest_gpu_mem": result.smallest_gpu_mem or None,
        }
        for result in results
    ]


def format_comparison(results: list[StrategyResult]) -> str:
    """Return the results as a table in plain text; times against the first strategy with a plan."""
    base = next((r.plan.step_seconds for r in results if r.plan is not None), 0.0)
    lines = [f"{'strategy':<22}{'step':>12}{'relative':>10}{'device':>12}{'host':>12}  bound by"]
    for result in results:
        plan = result.plan
        if plan is None:
            need = format_bytes(result.smallest_gpu_mem)
            lines.append(f"{result.strategy:<22}does not fit; it needs {need} of device memory")
            continue
        lines.append(
            f"{result.strategy:<22}{plan.step_seconds * 1e3:>9.1f} ms"
            f"{plan.step_seconds / base:>10.2f}{format_bytes(plan.device_peak_bytes):>12}"
            f"{format_bytes(plan.host_bytes):>12}  {plan.binding_lane}"
        )
    return "\n".join(lines)
