"""What following a model costs: hooks and tasks, per unit and pass, from 24 to 1000 units.

The layers are so small that nothing else takes time. Two runs train in turn in one process, plain
PyTorch and the wrapped twin with everything offloaded. The thread that trains is measured by its
own processor time, so neighbours do not count; what it spends on waiting is wall time besides. The
lanes' threads are measured the same way, per task (a copy, an update).

    python benchmarks/hooks.py [--units 24 96 384 1000] [--steps 30]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autohete import _C, AutoHeteWrapper, CPUAdamW, Plan
from autohete.layout import safest_plan
from autohete.units import find_units

WIDTH, WARM_UP, HOOK_LIMIT, TASK_LIMIT = 8, 6, 50.0, 10.0
PASSES = ("forward", "backward", "step")


def stack(units: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(units)])


def offloaded(model: nn.Module, optimizer: CPUAdamW) -> AutoHeteWrapper:
    plan = Plan()
    plan.units = safest_plan(find_units(model), native=True)
    for unit in plan.units:
        unit.activations = _C.ActivationRule.KEEP
    return AutoHeteWrapper(model, optimizer, gpu_mem="1GiB", plan=plan, profile_path=None)


class Clock:
    """Seconds of this thread, and of all other threads of the process, by pass."""

    def __init__(self) -> None:
        self.own: dict[str, list[float]] = {name: [] for name in PASSES}
        self.others: list[float] = []

    def step(self, model: nn.Module, optimizer: CPUAdamW, x: Tensor) -> None:
        def forward() -> Tensor:
            return model(x)

        process, thread = time.process_time(), time.thread_time()
        out: list[Tensor] = []
        actions: list[Callable[[], object]] = [
            lambda: out.append(forward()),
            lambda: out[0].backward(x),
            optimizer.step,
        ]
        for name, action in zip(PASSES, actions, strict=True):
            begun = time.thread_time()
            action()
            self.own[name].append(time.thread_time() - begun)
        optimizer.zero_grad()
        if isinstance(model, AutoHeteWrapper):
            model.synchronize()
        own = time.thread_time() - thread
        self.others.append(time.process_time() - process - own)


def measure(units: int, steps: int) -> tuple[dict[str, float], float]:
    """Return microseconds per unit by pass, ours less plain, and of the lanes per task."""
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH)
    plain, wrapped = stack(units), stack(units)
    plain_optimizer, optimizer = CPUAdamW(plain.parameters()), CPUAdamW(wrapped.parameters())
    ours = offloaded(wrapped, optimizer)
    clocks = (Clock(), Clock())
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            clocks = (Clock(), Clock())
        clocks[0].step(plain, plain_optimizer, x)
        clocks[1].step(ours, optimizer, x)
    ours.run.engine.record_timeline(True)
    clocks[1].step(ours, optimizer, x)
    per_step = len(ours.run.engine.take_timeline())
    costs = {
        name: (statistics.median(clocks[1].own[name]) - statistics.median(clocks[0].own[name]))
        / units * 1e6
        for name in PASSES
    }  # fmt: skip
    lanes = statistics.median(clocks[1].others) / per_step * 1e6
    ours.unwrap()
    return costs, lanes


@click.command()
@click.option("--units", multiple=True, type=int, default=(24, 96, 384, 1000), show_default=True)
@click.option("--steps", default=30, show_default=True)
def main(units: tuple[int, ...], steps: int) -> None:
    """Print what following a model costs, per unit and pass."""
    torch.set_num_threads(1)
    table = Table(title=f"microseconds per unit, medians of {steps} steps; bars {HOOK_LIMIT:g} "
                  f"a pass, {TASK_LIMIT:g} a task")  # fmt: skip
    for name in ("units", *PASSES, "lanes, per task"):
        table.add_column(name)
    for number in units:
        costs, lanes = measure(number, steps)
        table.add_row(str(number), *(f"{costs[name]:.1f}" for name in PASSES), f"{lanes:.1f}")
    console = Console(width=90)
    console.print(table)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch "
                  f"{torch.__version__}", highlight=False)  # fmt: skip


if __name__ == "__main__":
    main()
