"""Several ranks on the host device, against FSDP2 with CPUOffloadPolicy.

    python benchmarks/distributed.py --ranks 2

The same model, data, ranks and threads, over gloo. Both live in the same processes and take turns,
a few steps each per round, so that whatever else the machine does falls on both. Printed: medians
of a step, their ratio, the share of FSDP2's step that its optimizer takes, and how much of what
ours does on the CPU lane is hidden.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from autohete import AutoHeteWrapper
from autohete.demo.gpt import GPT, GPTConfig

Step = Callable[[], dict[str, float]]


def fsdp2(model: nn.Module, size: int, batches: Any) -> Step:
    mesh = init_device_mesh("cpu", (size,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> dict[str, float]:
        start = time.perf_counter()
        model(*next(batches)).backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return {"step": end - start, "optimizer": end - before}

    return step


def ours(model: nn.Module, batches: Any, gpu_mem: str) -> tuple[Step, AutoHeteWrapper]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem=gpu_mem, profile_path=None).to("cpu")

    def step() -> dict[str, float]:
        start = time.perf_counter()
        trained(*next(batches)).backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return {"step": end - start, "optimizer": end - before}

    return step, trained


def random_batches(options: argparse.Namespace, rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    shape = (options.batch, options.context + 1)
    while True:
        data = torch.randint(0, 256, shape, generator=generator)
        yield data[:, :-1], data[:, 1:]


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    size = options.ranks
    torch.set_num_threads(max((os.cpu_count() or 1) // size, 1))
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    config = GPTConfig(
        num_layers=options.layers, width=options.width, num_heads=8, context=options.context
    )
    model = GPT(config)
    peer = fsdp2(copy.deepcopy(model), size, random_batches(options, rank))
    own, trained = ours(model, random_batches(options, rank), options.gpu_mem)
    for step in (peer, own):  # the first steps are measured for a plan, and warm up
        for _ in range(4):
            step()
    trained.synchronize()
    seconds: dict[str, list[float]] = {"fsdp2": [], "fsdp2 optimizer": [], "ours": []}
    for _ in range(options.rounds):
        dist.barrier()
        for _ in range(options.steps):
            times = peer()
            seconds["fsdp2"].append(times["step"])
            seconds["fsdp2 optimizer"].append(times["optimizer"])
        dist.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            own()
        trained.synchronize()  # what runs on belongs to these steps
        seconds["ours"].append((time.perf_counter() - start) / options.steps)
    if rank == 0:
        show(options, model, seconds, trained)
    dist.barrier()
    trained.unwrap()
    dist.destroy_process_group()


def show(
    options: argparse.Namespace,
    model: nn.Module,
    seconds: dict[str, list[float]],
    trained: AutoHeteWrapper,
) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    number = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{options.ranks} ranks, {number:.1f} M parameters, batch {options.batch} a rank, load "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")  # fmt: skip
    for name, value in medians.items():
        print(f"{name:16} {value * 1e3:8.1f} ms   from {min(seconds[name]) * 1e3:.1f}")
    share = medians["fsdp2 optimizer"] / medians["fsdp2"]
    print(f"ours / fsdp2     {medians['ours'] / medians['fsdp2']:.3f}")
    print(f"optimizer's share of fsdp2's step s = {share:.2f}")
    report = trained.report()
    predicted = report.step_seconds_predicted
    if predicted:
        print(f"predicted        {predicted * 1e3:8.1f} ms")
    print({k: round(v, 3) for k, v in trained.run.engine.counters().items()})  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--gpu-mem", default="4GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, f"{folder}/store"), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
