"""What a busy neighbour on one core costs a small CPU update, beside torch's and DeepSpeed's.

Every step is timed by itself, many in a row, for the scheduler gives a thread that has slept its
share of a taken core at once: a few steps after a rest say nothing of a run. The competitors take
turns in blocks of 100 steps, in one process.

    python benchmarks/taken_core.py
    python benchmarks/taken_core.py --numel 100000 --neighbours 1 --pauses 0 0.003
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adamw import OtherWork, cpu_name, fp32_step

from autohete import _C

BLOCK = 100  # steps of one competitor in a row

NEIGHBOURS = {
    "spinning": ["sh", "-c", "while :; do :; done"],
    "training": [sys.executable, "-c", """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
print("begun", flush=True)
while True:
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""],
}  # fmt: skip


@contextmanager
def core_taken(core: int, kind: str, number: int) -> Iterator[None]:
    """Keep that many processes busy on the core."""
    command = ["taskset", "-c", str(core), *NEIGHBOURS[kind]]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(number)]
    try:
        if kind == "training":
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def each_step(run: Callable[[], object], pause: float) -> list[float]:
    """Return the milliseconds of each step of a block, with `pause` seconds of work in between."""
    times = []
    for _ in range(BLOCK):
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def table(title: str, times: dict[str, list[float]]) -> None:
    """Print mean, median and the slow steps, and mean and median over those of the first."""
    print(f"\n### {title}\n")
    print("| | mean ms | median | 90 % | 99 % | mean / ours | median / ours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ours = next(iter(times.values()))
    for name, values in times.items():
        cuts = statistics.quantiles(values, n=100)
        mean, median = statistics.mean(values), statistics.median(values)
        print(f"| {name} | {mean:.3g} | {median:.3g} | {cuts[89]:.3g} | {cuts[98]:.3g} "
              f"| {mean / statistics.mean(ours):.2f} "
              f"| {median / statistics.median(ours):.2f} |")  # fmt: skip


def measure(numel: int, kind: str, number: int, pause: float, rounds: int) -> None:
    core = max(os.sched_getaffinity(0))
    competitors = fp32_step([numel], _C.Workers(_C.default_num_workers()), foreach=False)
    times: dict[str, list[float]] = {name: [] for name, _ in competitors}
    with core_taken(core, kind, number):
        others = OtherWork()
        for _ in range(rounds):
            for name, run in competitors:
                times[name] += each_step(run, pause)
        busy = others.look()
    taken = f"core {core} taken by {number} {kind}" if number else "no core taken"
    between = f", {pause * 1e3:g} ms of other work between steps" if pause else ""
    table(f"{numel:,} fp32 parameters, {taken}{between}", times)
    print(f"\n{busy:.2f} CPUs busy with others, the neighbours among them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--kind", choices=NEIGHBOURS, default="spinning")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0], help="seconds")
    parser.add_argument("--rounds", type=int, default=3, help=f"blocks of {BLOCK} steps each")
    args = parser.parse_args()
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, Linux {os.uname().release}")
    for numel in args.numel:
        for number in args.neighbours:
            for pause in args.pauses:
                measure(numel, args.kind, number, pause, args.rounds)


if __name__ == "__main__":
    main()
