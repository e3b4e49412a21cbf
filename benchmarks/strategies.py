"""The four systems and the ablations on the same engine, over a grid of CPU rates.

On the host device: the model computes on one core, updates and copies run on the others, the CPU
lane is throttled to a stated rate, the links to a stated bandwidth. r is CPU work over device work
of one step. All loops run interleaved in one process: a few steps each per round, of which the
first is not counted (it pays for the loop before it); the period is the mean of the others.
`compute` is forward and backward alone, measured in the same rounds; the binding lane of a cell is
the longest of it, parameters / rate, and bytes / bandwidth.

    python benchmarks/strategies.py [--rounds 20] [--layers 24] [--width 128] [--tokens 256]
        [--r 0.5 --r 1 ...] [--clip never|always|none] [--link 2e9 [--latency 20e-6]]
        [--processes 4] [--json FILE]

Where a process's memory lies makes one loop of it some percent faster than another for all its
rounds: with --processes, several measure `rounds` each, and the medians of their medians count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import torch
from machine_speed import keep_heap
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from autohete import AutoHeteWrapper, Plan
from autohete._C import CopyDirection
from autohete.demo.gpt import GPT, GPTConfig
from autohete.layout import safest_plan
from autohete.planning import ActivationRule, Tier
from autohete.units import find_units

STEPS = 4  # of a loop in a round; the first is not counted


@dataclass
class Contender:
    """One loop: how it is wrapped and what was measured."""

    strategy: str = "autohete"
    keywords: dict[str, Any] = field(default_factory=dict)
    order: dict[str, bool] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def contenders() -> dict[str, Contender]:
    return {
        "compute": Contender("none"),
        "autohete": Contender(),
        "stronghold": Contender("stronghold"),
        "patrickstar": Contender("patrickstar"),
        "zero_offload": Contender("zero_offload"),
        "gated": Contender(keywords={"early_updates": False}),
        "first in, first out": Contender(order={"priority_order": False}),
        "barrier": Contender(order={"barrier": True}),
        "a copy per parameter": Contender(order={"aggregate": False}),
    }


def placement(model: nn.Module, strategy: str) -> Plan:
    """Everything offloaded, as far as the strategy offloads: ZeRO-Offload keeps its parameters."""
    plan = Plan()
    units = safest_plan(find_units(model), native=True)
    for unit in units:
        unit.activations = ActivationRule.KEEP
        if strategy == "zero_offload":
            unit.parameters = Tier.DEVICE
    plan.units = units
    plan.window = 4  # copies and updates share few cores here: two slots leave uploads exposed
    plan.chunk_bytes = 1 << 20
    return plan


class Loop:
    """A model and its training step."""

    def __init__(
        self, config: GPTConfig, contender: Contender, rate: float, link: float, latency: float = 0
    ) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.contender = contender
        self.wrapped: AutoHeteWrapper | None = None
        if contender.strategy == "none":
            return
        plan = placement(self.model, contender.strategy)
        self.wrapped = AutoHeteWrapper(
            self.model, self.optimizer, gpu_mem="16GiB", cpu_mem="8GiB", plan=plan,
            strategy=contender.strategy, num_workers=1, profile_path=None, **contender.keywords,
        ).to("cpu")  # fmt: skip
        self.model = self.wrapped
        run = self.wrapped.run
        if contender.order:
            run.engine.configure(plan.units, plan.window, plan.chunk_bytes, **contender.order)
        run.engine.set_update_rate(rate)
        if link:
            for direction in (CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_HOST):
                run.side.machine.set_link(direction, link, latency)

    def step(self, data: torch.Tensor, clip: str) -> None:
        logits = self.model(data[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).backward()
        if self.wrapped is not None:
            if clip != "none":
                limit = 1e9 if clip == "never" else 1e-3
                nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self, data: torch.Tensor, clip: str) -> float:
        """Seconds per step, the first left out."""
        ends = []
        for _ in range(STEPS):
            self.step(data, clip)
            ends.append(time.perf_counter())
        if self.wrapped is not None:
            self.wrapped.synchronize()
        return (ends[-1] - ends[0]) / (STEPS - 1)


def part_cores(cores: list[int]) -> str:
    """This thread on one core, all others (updates, copies) on the rest; says what was done."""
    main = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        mine = int(task.name) == main
        os.sched_setaffinity(int(task.name), {cores[0]} if mine or len(cores) == 1 else cores[1:])
    return f"compute on core {cores[0]}, the rest on {len(cores) - 1} more"


def measure_cell(
    config: GPTConfig, data: torch.Tensor, r: float, seconds: float, rounds: int, clip: str,
    link: float, latency: float, cores: list[int], names: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """All contenders at one r, interleaved. `seconds` is what forward and backward take."""
    model = GPT(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    rate = num_parameters / (r * seconds)
    fields = {n: c for n, c in contenders().items() if n in ("compute", "autohete", *names)}
    loops = {name: Loop(config, c, rate, link, latency) for name, c in fields.items()}
    for loop in loops.values():
        loop.round(data, clip)
    parted = part_cores(cores)
    for _ in range(rounds):
        for name, loop in loops.items():
            fields[name].seconds.append(loop.round(data, clip))
    times = {name: median(c.seconds) for name, c in fields.items()}
    compute = times.pop("compute")
    link_bytes = 4 * num_parameters  # gradients down once, parameters up twice at most
    lanes = {
        "compute": compute,
        "CPU": num_parameters / rate,
        "link": 2 * link_bytes / link if link else 0.0,
    }
    binding = max(lanes, key=lambda name: lanes[name])
    ahead = loops["autohete"].wrapped.run.engine.counters()  # type: ignore[union-attr]
    for loop in loops.values():
        if loop.wrapped is not None:
            loop.wrapped.unwrap()
    return {
        "r": r, "compute": compute, "lanes": lanes, "binding": binding, "times": times,
        "load": os.getloadavg()[0], "cores": parted,
        "updates_ahead": ahead["updates_ahead"], "updates": ahead["updates"],
    }  # fmt: skip


def in_processes(count: int) -> list[dict[str, Any]]:
    """The cells that this command measures, each the median of several processes' ones."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = Path(folder) / f"{number}.json"
            command = [sys.executable, *sys.argv, "--processes", "1", "--json", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            runs.append(json.loads(path.read_text())["cells"])
    return [_median_cell(list(cells)) for cells in zip(*runs, strict=True)]


def _median_cell(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the lanes, and of the ratios: processes are not equally fast."""
    lanes = {name: median(cell["lanes"][name] for cell in cells) for name in cells[0]["lanes"]}
    binding = max(lanes, key=lambda name: lanes[name])
    times = {
        name: lanes[binding]
        * median(cell["times"][name] / max(cell["lanes"].values()) for cell in cells)
        for name in cells[0]["times"]
    }
    return {**cells[0], "lanes": lanes, "binding": binding, "times": times}


def show(cells: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    names = list(cells[0]["times"])
    for column in ("r", "binding", "ms", *names):
        table.add_column(column, justify="right")
    for cell in cells:
        bound = cell["lanes"][cell["binding"]]
        row = [f"{cell['r']:.2f}", cell["binding"], f"{1e3 * bound:.0f}"]
        table.add_row(*row, *(f"{cell['times'][n] / bound:.2f}" for n in names))
    console = Console(width=140)
    console.print(table)
    middle = [c for c in cells if 0.7 <= c["r"] <= 1.5]
    if not middle:
        return
    gains = {
        n: geometric_mean(c["times"][n] / c["times"]["autohete"] for c in middle)
        for n in names
        if n != "autohete"
    }
    console.print(
        "autohete over (geometric mean, 0.7 <= r <= 1.5): "
        + ", ".join(f"{n} {g:.2f}" for n, g in gains.items())
    )


@click.command()
@click.option("--rounds", default=20, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="Per step, in rows of 128.")
@click.option("--r", "ratios", multiple=True, type=float, default=(0.5, 0.7, 0.85, 1, 1.2, 1.5, 2))
@click.option("--against", multiple=True, default=list(contenders())[2:], show_default=True)
@click.option("--clip", type=click.Choice(["none", "never", "always"]), default="none",
              show_default=True, help="clip_grad_norm_: does it clip?")  # fmt: skip
@click.option("--link", default=0.0, help="Bytes per second each way; 0: as fast as memory.")
@click.option("--latency", default=0.0, help="Seconds that each copy over such a link takes more.")
@click.option("--processes", default=1, show_default=True, help="Medians over so many.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the figures go.")
def main(
    rounds: int, layers: int, width: int, tokens: int, ratios: tuple[float, ...], clip: str,
    link: float, latency: float, processes: int, path: str | None, against: tuple[str, ...],
) -> None:  # fmt: skip
    """Print step times over the binding lane's for each strategy and r."""
    if processes > 1:
        cells = in_processes(processes)
    else:
        cells = measure(rounds, layers, width, tokens, ratios, clip, link, latency, against)
    links = f"links {link:.1e} B/s, {latency:.1e} s a copy" if link else "links not throttled"
    size = f"{layers} layers, width {width}, {tokens} tokens"
    title = f"step / binding lane: {size}, clip {clip}, {links}"
    show(cells, title)
    print(f"load average {os.getloadavg()[0]:.1f}, {cells[0]['cores']}, torch {torch.__version__}")
    if path:
        Path(path).write_text(json.dumps({"title": title, "cells": cells}, indent=1))


def measure(
    rounds: int, layers: int, width: int, tokens: int, ratios: tuple[float, ...], clip: str,
    link: float, latency: float, against: tuple[str, ...],
) -> list[dict[str, Any]]:  # fmt: skip
    keep_heap()
    torch.set_num_threads(1)
    config = GPTConfig(num_layers=layers, width=width, num_heads=4, dropout=0.0)
    data = torch.randint(0, 256, (max(tokens // 128, 1), 129))
    alone = Loop(config, Contender("none"), 0, 0)
    alone.round(data, "none")
    cores = sorted(os.sched_getaffinity(0))
    part_cores(cores)
    seconds = median(alone.round(data, "none") for _ in range(5))
    return [
        measure_cell(config, data, r, seconds, rounds, clip, link, latency, cores, against)
        for r in ratios
    ]


if __name__ == "__main__":
    main()
