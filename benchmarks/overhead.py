"""What autohete costs when nothing needs to leave the device, and when everything does.

Plain PyTorch with fused AdamW and the wrapped twins train the same model on the same data, step by
step in turn in one process; the ratios of the medians are printed with how busy the machine was.

    python benchmarks/overhead.py [--rounds 30] [--layers 6] [--width 256] [--tokens 1024]
"""

from __future__ import annotations

import os
import time
from statistics import median

import click
import torch
from machine_speed import keep_heap
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from autohete import AutoHeteWrapper, Plan
from autohete.demo.gpt import GPT, GPTConfig
from autohete.layout import safest_plan
from autohete.planning import ActivationRule, Tier
from autohete.units import find_units


def everything_offloaded(model: nn.Module) -> Plan:
    plan = Plan()
    plan.units = safest_plan(find_units(model), native=True)
    for unit in plan.units:
        unit.activations = ActivationRule.KEEP  # what recomputing costs is not the question here
    return plan


def states_offloaded(model: nn.Module) -> Plan:
    plan = everything_offloaded(model)
    units = plan.units
    for unit in units:
        unit.parameters = Tier.DEVICE
    plan.units = units
    return plan


@click.command()
@click.option("--rounds", default=30, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--tokens", default=1024, show_default=True, help="Per step, in rows of 128.")
def main(rounds: int, layers: int, width: int, tokens: int) -> None:
    """Print step times relative to plain PyTorch with fused AdamW."""
    keep_heap()
    config = GPTConfig(num_layers=layers, width=width, dropout=0.0)
    data = torch.randint(0, 256, (max(tokens // 128, 1), 129))
    makers = {"nothing planned": None, "state": states_offloaded, "all": everything_offloaded}
    loops = {}
    for name in ("plain", *makers):
        torch.manual_seed(0)
        model: nn.Module = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if name != "plain":
            maker = makers[name]
            plan = maker(model) if maker else None
            model = AutoHeteWrapper(
                model, optimizer, gpu_mem="16GiB", cpu_mem="16GiB", plan=plan, profile_path=None
            ).to("cpu")
        loops[name] = (model, optimizer)

    def step(name: str) -> float:
        model, optimizer = loops[name]
        start = time.perf_counter()
        logits = model(data[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for name in loops:
        for _ in range(3):
            step(name)
    for _ in range(rounds):
        for name in loops:
            seconds[name].append(step(name))
            if name != "plain":
                loops[name][0].synchronize()  # the next loop's step must not pay for this one's
    table = Table(title=f"{layers} layers, width {width}, {tokens} tokens; medians of {rounds}")
    for column in ("loop", "ms", "ratio to plain", "ratio, paired median"):
        table.add_column(column)
    base = seconds["plain"]
    for name, times in seconds.items():
        paired = median(a / b for a, b in zip(times, base, strict=True))
        table.add_row(
            name,
            f"{1e3 * median(times):.1f}",
            f"{median(times) / median(base):.3f}",
            f"{paired:.3f}",
        )
    Console().print(table)
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
