"""Everything offloaded beside the peers that run without a GPU, each as itself.

Plain PyTorch (fused AdamW), DeepSpeed ZeRO-2 and ZeRO-3 with offload (on its CPU accelerator, where
it is installed), FSDP2 with CPUOffloadPolicy, and autohete with everything offloaded and in
ZeRO-Offload's order: the same model, data and threads, links not throttled. All take turns in one
process, a few steps each per round, of which the first is not counted.

    python benchmarks/peers.py [--rounds 15] [--layers 12] [--width 256] [--tokens 256 ...]
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import click
import psutil
import torch
import torch.distributed as dist
from machine_speed import keep_heap
from overhead import everything_offloaded
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from autohete import AutoHeteWrapper
from autohete.demo.gpt import GPT, GPTConfig
from autohete.planning import Tier

STEPS = 4  # of a loop in a round; the first is not counted
Step = Callable[[torch.Tensor], None]
Wait = Callable[[], None]


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(data: torch.Tensor) -> None:
        model(data[:, :-1], data[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(model: nn.Module) -> tuple[Step, Wait]:
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)), _nothing


def _nothing() -> None:
    return None


def ours(model: nn.Module, strategy: str) -> tuple[Step, Wait]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    plan = everything_offloaded(model)
    if strategy == "zero_offload":  # it keeps its parameters on the device
        units = plan.units
        for unit in units:
            unit.parameters = Tier.DEVICE
        plan.units = units
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="16GiB", cpu_mem="16GiB", plan=plan, strategy=strategy,
        process_group=False, profile_path=None,
    ).to("cpu")  # fmt: skip
    return torch_step(wrapped, optimizer), wrapped.synchronize


def deepspeed(model: nn.Module, stage: int, rows: int) -> tuple[Step, Wait]:
    import deepspeed as ds

    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    optimizer = ds.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
    engine, *_ = ds.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": rows,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(data: torch.Tensor) -> None:
        engine.backward(engine(data[:, :-1], data[:, 1:]))
        engine.step()

    return step, _nothing


def fsdp2(model: nn.Module) -> tuple[Step, Wait]:
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)), _nothing


def contenders(rows: int) -> dict[str, Callable[[nn.Module], tuple[Step, Wait]]]:
    makers: dict[str, Callable[[nn.Module], tuple[Step, Wait]]] = {
        "plain": plain,
        "autohete": lambda model: ours(model, "autohete"),
        "our zero_offload": lambda model: ours(model, "zero_offload"),
        "FSDP2 offload": fsdp2,
    }
    if importlib.util.find_spec("deepspeed"):
        makers["DeepSpeed ZeRO-2"] = lambda model: deepspeed(model, 2, rows)
        makers["DeepSpeed ZeRO-3"] = lambda model: deepspeed(model, 3, rows)
    return makers


def measure(config: GPTConfig, tokens: int, rounds: int) -> dict[str, list[float]]:
    rows = max(tokens // 128, 1)
    data = torch.randint(0, 256, (rows, 129))
    loops = {}
    for name, make in contenders(rows).items():
        torch.manual_seed(0)
        loops[name] = make(GPT(config))
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-1, rounds):
        for name, (step, wait) in loops.items():
            ends = []
            for _ in range(STEPS):
                step(data)
                ends.append(time.perf_counter())
            wait()  # the next loop must not pay for what goes on here
            if number >= 0:
                seconds[name].append((ends[-1] - ends[0]) / (STEPS - 1))
    return seconds


def show(seconds: dict[str, list[float]], title: str) -> None:
    table = Table("loop", "ms", "of plain", "paired median", title=title)
    base = seconds["plain"]
    for name, times in seconds.items():
        paired = median(a / b for a, b in zip(times, base, strict=True))
        ratio = median(times) / median(base)
        table.add_row(name, f"{1e3 * median(times):.1f}", f"{ratio:.3f}", f"{paired:.3f}")
    Console(width=100).print(table)


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--layers", default=12, show_default=True)
@click.option("--width", default=256, show_default=True)
@click.option("--tokens", multiple=True, default=(256, 1024), show_default=True,
              help="Per step, in rows of 128.")  # fmt: skip
def main(rounds: int, layers: int, width: int, tokens: tuple[int, ...]) -> None:
    """Print step times relative to plain PyTorch with fused AdamW."""
    keep_heap()
    warnings.filterwarnings("ignore")  # the peers' own
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        config = GPTConfig(num_layers=layers, width=width, dropout=0.0)
        for count in tokens:
            psutil.cpu_percent()
            before = psutil.Process().cpu_times()
            start = time.perf_counter()
            seconds = measure(config, count, rounds)
            wall = time.perf_counter() - start
            after = psutil.Process().cpu_times()
            own = (after.user + after.system - before.user - before.system) / wall
            cores = psutil.cpu_count() or 1
            others = max(psutil.cpu_percent() / 100 * cores - own, 0.0)
            show(seconds, f"{layers} layers, width {width}, {count} tokens; {rounds} rounds")
            print(f"others kept {others:.2f} of {cores} cores busy, torch {torch.__version__}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
