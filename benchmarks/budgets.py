"""The strategies under a budget that leaves each a plan to choose, on the same lanes.

As strategies.py (compute on one core, CPU lane throttled to a stated r, all loops in turn), but
each strategy is planned for the same `gpu_mem`: a share of the way from the least that autohete
needs to what keeps everything on the device. Strategies that do not fit there are left out.

    python benchmarks/budgets.py [--rounds 10] [--r 0.7 --r 1 --r 1.5] [--share 0.3] [--link 2e9]
"""

from __future__ import annotations

import os
import time
from statistics import median

import click
import torch
from calibration import MODELS, Job, Loop, Throttle, calibrate, part_cores
from rich.console import Console
from rich.table import Table

from autohete import Plan
from autohete.planning import InfeasibleError, Profile, make_plan

STRATEGIES = ("autohete", "stronghold", "patrickstar", "zero_offload")
STEPS = 4  # of a loop in a round; the first is not counted


def compute_seconds(job: Job, batch: int) -> float:
    model, data = job.model(), job.data(batch)
    part_cores(job.cores)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        model(data[:, :-1], data[:, 1:]).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def plan_or_none(profile: Profile, budget: int, strategy: str) -> Plan | None:
    profile.speculates = strategy == "autohete"
    try:
        return make_plan(profile, budget, strategy=strategy, gated=strategy != "autohete")
    except InfeasibleError:
        return None


def budget_at(profile: Profile, share: float) -> int:
    try:
        make_plan(profile, 1, strategy="autohete")
        raise AssertionError("nothing fits in a byte")
    except InfeasibleError as error:
        least: int = error.smallest_gpu_mem  # type: ignore[attr-defined]
    everything = make_plan(profile, 2**50, strategy="device_only").device_peak_bytes
    return int(least + share * max(everything - least, 0)) + 1


def measure_round(loop: Loop) -> float:
    ends = []
    for _ in range(STEPS):
        loop.step()
        ends.append(time.perf_counter())
    loop.run.synchronize()
    return (ends[-1] - ends[0]) / (STEPS - 1)


def measure_cell(
    job: Job, batch: int, r: float, share: float, link: float, rounds: int
) -> tuple[int, dict[str, tuple[float, float]]]:
    """The budget, and (measured, predicted) seconds of a step by strategy."""
    count = sum(p.numel() for p in job.model().parameters())
    throttle = Throttle(link, count / (r * compute_seconds(job, batch)))
    profile, _ = calibrate(job, (batch, 2 * batch), throttle)
    budget = budget_at(profile, share)
    plans = {name: plan_or_none(profile, budget, name) for name in STRATEGIES}
    loops = {name: Loop(job, plan, batch, throttle) for name, plan in plans.items() if plan}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-1, rounds):
        for name, loop in loops.items():
            taken = measure_round(loop)
            if number >= 0:
                seconds[name].append(taken)
    for loop in loops.values():
        loop.close()
    figures = {}
    for name, times in seconds.items():
        plan = plans[name]
        assert plan is not None
        figures[name] = median(times), plan.step_seconds
    return budget, figures


@click.command()
@click.option("--rounds", default=10, show_default=True)
@click.option("--model", "model_name", type=click.Choice(list(MODELS)), default="gpt 24x128",
              show_default=True)  # fmt: skip
@click.option("--rows", default=2, show_default=True, help="Of 128 tokens.")
@click.option("--r", "ratios", multiple=True, type=float, default=(0.7, 1, 1.5))
@click.option("--share", default=0.3, show_default=True)
@click.option("--link", default=2e9, show_default=True, help="Bytes per second each way.")
def main(
    rounds: int, model_name: str, rows: int, ratios: tuple[float, ...], share: float, link: float
) -> None:
    """Print step times of the strategies under one budget, and their ratios to autohete's."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    job = Job(MODELS[model_name], 128, 0.0, cores)
    title = f"{model_name}, {128 * rows} tokens, share {share}, links {link:.1e} B/s"
    table = Table("r", "gpu_mem MB", *(f"{name} ms (predicted)" for name in STRATEGIES),
                  *(f"{name} / autohete" for name in STRATEGIES[1:]), title=title)  # fmt: skip
    for r in ratios:
        budget, figures = measure_cell(job, rows, r, share, link, rounds)
        times = [
            f"{1e3 * figures[n][0]:.0f} ({1e3 * figures[n][1]:.0f})" if n in figures else "-"
            for n in STRATEGIES
        ]
        gains = [
            f"{figures[n][0] / figures['autohete'][0]:.2f}" if n in figures else "-"
            for n in STRATEGIES[1:]
        ]
        table.add_row(f"{r:.2f}", f"{budget / 1e6:.0f}", *times, *gains)
    Console(width=160).print(table)
    print(f"load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
