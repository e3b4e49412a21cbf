"""How even the steps are: the 99th percentile of step times against their median.

Plain PyTorch and the wrapped twins (everything offloaded; planned) train in turn, step by step in
one process, so that whatever else the machine does falls on all of them. A stall of the pipeline
would show as a ratio that plain PyTorch does not have.

    python benchmarks/step_times.py [--steps 300] [--layers 6] [--width 256] [--tokens 1024]
"""

from __future__ import annotations

import os
import time

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW, Plan
from autohete.demo.gpt import GPT, GPTConfig
from autohete.layout import safest_plan
from autohete.units import find_units

WARM_UP, LIMIT = 10, 1.3


def safest(model: nn.Module) -> Plan:
    plan = Plan()
    plan.units = safest_plan(find_units(model), native=True)
    return plan


@click.command()
@click.option("--steps", default=300, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--tokens", default=1024, show_default=True, help="Per step, in rows of 128.")
@click.option("--gpu-mem", default="64MiB", show_default=True, help="For the planned run.")
def main(steps: int, layers: int, width: int, tokens: int, gpu_mem: str) -> None:
    """Print median and 99th percentile of the step times of plain and wrapped training."""
    config = GPTConfig(num_layers=layers, width=width, dropout=0.0)
    data = torch.randint(0, 256, (max(tokens // 128, 1), 129))
    pairs = {}
    for name in ("plain", "everything offloaded", "planned"):
        torch.manual_seed(0)
        model: nn.Module = GPT(config)
        optimizer = CPUAdamW(model.parameters(), lr=1e-4)
        if name != "plain":
            plan = safest(model) if name == "everything offloaded" else None
            budget = "4GiB" if plan else gpu_mem
            model = AutoHeteWrapper(model, optimizer, budget, plan=plan, profile_path=None)
            model.to("cpu")
        pairs[name] = (model, optimizer)
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for step in range(WARM_UP + steps):
        for name, (model, optimizer) in pairs.items():
            start = time.perf_counter()
            model(data[:, :-1], data[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    table = Table("run", "median ms", "p99 ms", "p99 / median", f"within {LIMIT}")
    for name, times in seconds.items():
        middle, high = (float(np.percentile(times, q)) * 1e3 for q in (50, 99))
        within = "yes" if high <= LIMIT * middle else "no"
        table.add_row(name, f"{middle:.1f}", f"{high:.1f}", f"{high / middle:.2f}", within)
    console = Console()
    console.print(table)
    load = os.getloadavg()[0]
    console.print(f"{os.cpu_count()} CPUs, load {load:.1f}: the figures hold for a quiet machine")


if __name__ == "__main__":
    main()
