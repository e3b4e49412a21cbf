"""Prediction against reality: step times and device peaks of plans, predicted, then measured.

On the host device: the model computes on one core, copies and updates run on the others, links and
CPU lane are throttled to stated rates. Each model is timed once, beforehand, at two batch sizes,
and for what its compute loses beside copies and updates (calibration.py); the settings that count
have other batches, other budgets, and the plans of all strategies. 24 settings: four models times
six strategies, two batches and two budgets in turn. Before a setting is planned and predicted, the
machine's speed is read (machine_speed.py); what the error would be without is printed too.

    python benchmarks/prediction.py [--steps 12] [--json FILE] [--only NAME] [--paced SECONDS]
        [--markdown]
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import click
import numpy as np
import torch
from calibration import MODELS, Job, Loop, Throttle, at_batch, calibrate, part_cores
from machine_speed import Busy, Speed, slowed
from rich.console import Console
from rich.table import Table

from autohete import Plan
from autohete.planning import STRATEGIES, InfeasibleError, Profile, make_plan, simulate

CALIBRATED, TESTED = (2, 6), (3, 5)  # rows
BUDGETS = (0.25, 0.6)  # of the way from the strategy's least to what keeps everything
WARM_UP = 2
BARS = {"mean": 0.05, "p90": 0.10, "peak": 0.05, "under": 0.02}


@dataclass
class Setting:
    """One plan, predicted and measured."""

    model: str
    strategy: str
    batch: int
    gpu_mem: int
    lane: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int
    others: float
    """Cores that anything else kept busy meanwhile."""
    slowness: float
    """Of the machine just before, as a multiple of what it was at calibration."""
    calibrated_seconds: float
    """Predicted for the speed at calibration."""

    @property
    def seconds_error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def calibrated_error(self) -> float:
        return self.calibrated_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def plan_of(profile: Profile, strategy: str, share: float) -> tuple[Plan, int]:
    """A plan of the strategy for a budget between its least and everything; and the budget."""
    gated = strategy != "autohete"
    profile.speculates = not gated
    try:
        make_plan(profile, 1, strategy=strategy, gated=gated)
        raise AssertionError("nothing fits in a byte")
    except InfeasibleError as error:
        least: int = error.smallest_gpu_mem  # type: ignore[attr-defined]
    everything = make_plan(profile, 2**50, strategy="device_only").device_peak_bytes
    budget = int(least + share * max(everything - least, 0)) + 1
    return make_plan(profile, budget, strategy=strategy, gated=gated), budget


def measure(
    job: Job, plan: Plan, batch: int, throttle: Throttle, steps: int
) -> tuple[float, int, float]:
    """Median step seconds, largest device bytes, and cores that others kept busy."""
    loop = Loop(job, plan, batch, throttle)
    for _ in range(WARM_UP):
        loop.step()
    side = loop.run.side
    side.reset_peak()
    busy, ends = Busy(), [time.perf_counter()]
    for _ in range(steps):
        loop.step()
        ends.append(time.perf_counter())
    others, peak = busy.others(), side.peak()
    loop.run.synchronize()
    loop.close()
    return median(np.diff(ends)), peak, others


def throttle_for(job: Job) -> Throttle:
    """Rates at which gradients take 0.4 and updates 0.7 of what compute takes, at the middle batch.

    Never as long as a layer's backward: there the number of gradients that wait, and with it the
    peak, would be a matter of luck.
    """
    model = job.model()
    data = job.data(sum(TESTED) // 2)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        model(data[:, :-1], data[:, 1:]).backward()
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    count = sum(p.numel() for p in model.parameters())
    compute = float(f"{median(seconds):.1g}")
    return Throttle(4 * count / (0.4 * compute), count / (0.7 * compute))


def run_model(name: str, index: int, job: Job, steps: int) -> list[Setting]:
    torch.manual_seed(0)
    throttle = throttle_for(job)
    speed = Speed(job.model(), job.data(CALIBRATED[0]))
    profiles = calibrate(job, CALIBRATED, throttle, speed)
    settings = []
    for s, strategy in enumerate(STRATEGIES):
        batch = TESTED[(index + s) % 2]
        calibrated, slowness = at_batch(profiles, CALIBRATED, batch), speed.now()
        profile = slowed(calibrated, slowness)
        plan, budget = plan_of(profile, strategy, BUDGETS[(index + s // 2) % 2])
        seconds, peak, others = measure(job, plan, batch, throttle, steps)
        settings.append(
            Setting(
                name, strategy, batch, budget, plan.binding_lane, plan.step_seconds, seconds,
                plan.device_peak_bytes, peak, others, slowness,
                simulate(
                    calibrated, plan, gated=False if strategy == "autohete" else None
                ).step_seconds,
            )
        )  # fmt: skip
    return settings


COLUMNS = (
    "model", "strategy", "rows", "gpu_mem MB", "busiest", "predicted ms", "measured ms", "error",
    "peak MB predicted", "measured", "error", "others", "slowness", "error without it",
)  # fmt: skip


def row_of(s: Setting) -> list[str]:
    return [
        s.model, s.strategy, str(s.batch), f"{s.gpu_mem / 1e6:.0f}", s.lane,
        f"{1e3 * s.predicted_seconds:.1f}", f"{1e3 * s.measured_seconds:.1f}",
        f"{s.seconds_error:+.1%}", f"{s.predicted_bytes / 1e6:.1f}",
        f"{s.measured_bytes / 1e6:.1f}", f"{s.bytes_error:+.1%}", f"{s.others:.2f}",
        f"{s.slowness:.2f}", f"{s.calibrated_error:+.1%}",
    ]  # fmt: skip


def verdicts(settings: list[Setting]) -> list[str]:
    times = [abs(s.seconds_error) for s in settings]
    peaks = [s.bytes_error for s in settings]
    figures = [
        ("step time, mean of relative errors", mean(times), BARS["mean"]),
        ("step time, 90th percentile", float(np.percentile(times, 90)), BARS["p90"]),
        ("device peak, largest relative error", max(map(abs, peaks)), BARS["peak"]),
        ("device peak, most that was above the prediction", max(-min(peaks), 0.0), BARS["under"]),
    ]
    lines = [
        f"{name}: {value:.1%} (bar {bar:.0%}: {'met' if value <= bar else 'not met'})"
        for name, value, bar in figures
    ]
    calibrated = [abs(s.calibrated_error) for s in settings]
    mean_of, p90 = mean(calibrated), np.percentile(calibrated, 90)
    return [*lines, f"without the reading of the machine's speed: {mean_of:.1%} and {p90:.1%}"]


def show(settings: list[Setting], markdown: bool) -> None:
    rows = [row_of(s) for s in settings]
    if markdown:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        print("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
        print("\n".join(f"- {line}" for line in verdicts(settings)))
        return
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    console = Console(width=150)
    console.print(table)
    for line in verdicts(settings):
        console.print(line)


@click.command()
@click.option("--steps", default=12, show_default=True, help="Measured, of each setting.")
@click.option("--only", default="", help="Only models whose name contains this.")
@click.option(
    "--paced",
    default=0.0,
    help="Seconds that each layer takes for a row, instead of "
    "computing on 128 tokens: for a machine on which others run.",
)
@click.option("--markdown", is_flag=True, help="Print the table as docs/results has it.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the figures go.")
def main(steps: int, only: str, paced: float, markdown: bool, path: str | None) -> None:
    """Print predicted and measured step times and device peaks of 24 settings."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    parted = part_cores(cores)
    start, settings = time.perf_counter(), []
    for index, name in enumerate(MODELS):
        if only in name:
            job = Job(MODELS[name], 8 if paced else 128, paced, cores)
            settings += run_model(name, index, job, steps)
    show(settings, markdown)
    others = [s.others for s in settings]
    print(
        f"{len(settings)} settings in {time.perf_counter() - start:.0f} s; {parted}; others kept "
        f"{mean(others):.2f} cores busy on average, {max(others):.2f} at most; load average "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    )
    if path:
        Path(path).write_text(json.dumps([asdict(s) for s in settings], indent=1))


if __name__ == "__main__":
    main()
