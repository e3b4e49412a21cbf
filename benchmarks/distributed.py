"""Several ranks on the host device, against FSDP2 with CPUOffloadPolicy, or our own zero_offload.

    python benchmarks/distributed.py --ranks 2
    python benchmarks/distributed.py --ranks 2 --r 1 --link 200e6

The same model, data, ranks and threads, over gloo. All live in the same processes and take turns,
a few steps each per round, so that whatever else the machine does falls on all. The third is the
same FSDP2 model whose updates are ours (ShardedUpdates). Printed: medians of the rounds' mean steps
and of each round's ratios, the share of FSDP2's step that its optimizer takes, and how much of what
ours does on the CPU lane is hidden: the steps wait for the rest. Rounds begin and end with nothing
on its way. Before them ours takes --steady steps in a row: there a step is what one takes among
others, and the prediction is held against their median.

With --r both are ours, everything offloaded, in the order of autohete and of ZeRO-Offload (whose
parameters stay on the device); updates are throttled to r times what a rank computes, links to
--link. Only so does a small machine have lanes of a GPU's proportions. There a step is what one
takes among others, from the end of a round's first step to the end of its last, as in
strategies.py; the whole round, which begins and ends with nothing on its way, is printed beside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from autohete import AutoHeteWrapper, CPUAdamW, ShardedUpdates
from autohete._C import CopyDirection
from autohete.demo.gpt import GPT, GPTConfig
from autohete.layout import safest_plan
from autohete.planning import ActivationRule, Plan, Tier
from autohete.units import find_units

Step = Callable[[], dict[str, float]]


def sharded(model: nn.Module, options: argparse.Namespace) -> None:
    """Make it an FSDP2 model whose memory is on the host."""
    mesh = init_device_mesh("cpu", (options.ranks,))
    policy = CPUOffloadPolicy(pin_memory=False)
    keywords: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": policy,
        "reshard_after_forward": not options.peer_keeps_gathered,
    }
    if options.half:
        keywords["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)


def step_of(model: nn.Module, optimizer: Any, batches: Any) -> Step:
    def step() -> dict[str, float]:
        start = time.perf_counter()
        model(*next(batches)).backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return {"step": end - start, "optimizer": end - before}

    return step


def fsdp2(model: nn.Module, batches: Any, options: argparse.Namespace) -> Step:
    sharded(model, options)
    kind = {"fused": True} if options.peer_adamw == "fused" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=options.amsgrad, **kind)
    return step_of(model, optimizer, batches)


def fsdp2_with_our_updates(
    model: nn.Module, batches: Any, options: argparse.Namespace
) -> tuple[Step, ShardedUpdates]:
    sharded(model, options)
    optimizer = CPUAdamW(model.parameters(), lr=1e-4, amsgrad=options.amsgrad)
    updates = ShardedUpdates(model, optimizer)
    return step_of(model, optimizer, batches), updates


def ours(
    model: nn.Module, batches: Any, gpu_mem: str, *, amsgrad: bool = False, **keywords: Any
) -> tuple[Step, AutoHeteWrapper]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=amsgrad)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem=gpu_mem, profile_path=None, **keywords).to(
        "cpu"
    )
    return step_of(trained, optimizer, batches), trained


def random_batches(options: argparse.Namespace, rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    shape = (options.batch, options.context + 1)
    while True:
        data = torch.randint(0, 256, shape, generator=generator)
        yield data[:, :-1], data[:, 1:]


def median_ratio(seconds: list[float], others: list[float]) -> float:
    """Of each round by itself: what else the machine does falls on both."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


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
    if options.r:
        measure_orders(rank, options, model)
        dist.destroy_process_group()
        return
    peer = fsdp2(copy.deepcopy(model), random_batches(options, rank), options)
    mixed, updates = fsdp2_with_our_updates(
        copy.deepcopy(model), random_batches(options, rank), options
    )
    own, trained = ours(
        model.bfloat16() if options.half else model,
        random_batches(options, rank),
        options.gpu_mem,
        amsgrad=options.amsgrad,
        precision="bf16" if options.half else None,
        whole_gradients=not options.own_rows,
    )
    for step in (peer, mixed, own):  # the first steps are measured for a plan, and warm up
        for _ in range(24):
            step()
    before = trained.run.engine.counters()  # type: ignore[union-attr]
    steady = steady_seconds(own, options.steady)
    if rank == 0:
        show_hidden("in a row", before, trained)
        show_prediction(steady, trained)
    trained.synchronize()
    updates.synchronize()
    seconds: dict[str, list[float]] = {
        name: [] for name in ("fsdp2", "fsdp2 optimizer", "fsdp2, our updates", "ours")
    }
    before = trained.run.engine.counters()  # type: ignore[union-attr]
    for _ in range(options.rounds):
        dist.barrier()
        taken = [peer() for _ in range(options.steps)]
        seconds["fsdp2"].append(statistics.mean(t["step"] for t in taken))
        seconds["fsdp2 optimizer"].append(statistics.mean(t["optimizer"] for t in taken))
        for name, step, whole in (
            ("fsdp2, our updates", mixed, updates),
            ("ours", own, trained),
        ):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                step()
            whole.synchronize()  # what runs on belongs to these steps
            seconds[name].append((time.perf_counter() - start) / options.steps)
    if rank == 0:
        show(options, model, seconds, trained)
        show_hidden("rounds", before, trained)
    dist.barrier()
    trained.unwrap()
    dist.destroy_process_group()


def steady_seconds(step: Step, count: int) -> list[float]:
    """Each of so many steps in a row, from one's end to the next one's: what is predicted."""
    dist.barrier()
    ends = []
    for _ in range(count + 2):
        step()
        ends.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(ends[1:])]


def show_prediction(steady: list[float], trained: AutoHeteWrapper) -> None:
    """A step among others; the rounds above begin and end at rest."""
    measured = statistics.median(steady)
    predicted = trained.report().step_seconds_predicted
    print(f"ours, {len(steady)} in a row {measured * 1e3:8.1f} ms   from {min(steady) * 1e3:.1f}")
    if predicted:
        print(f"predicted        {predicted * 1e3:8.1f} ms   {predicted / measured - 1:+.1%}")


def show_hidden(of_what: str, before: dict[str, Any], trained: AutoHeteWrapper) -> None:
    now = trained.run.engine.counters()  # type: ignore[union-attr]
    busy = now["cpu_busy_seconds"] - before["cpu_busy_seconds"]
    waited = now["wait_update_seconds"] - before["wait_update_seconds"]
    if busy > 0:
        print(
            f"updates, {of_what}: busy {busy:.3f} s, waited for {waited:.3f} s: "
            f"hidden {1 - waited / busy:.2f}"
        )


def all_offloaded(model: nn.Module, strategy: str) -> Plan:
    plan = Plan()
    units = safest_plan(find_units(model), native=True)
    for unit in units:
        unit.activations = ActivationRule.KEEP
        if strategy == "zero_offload":
            unit.parameters = Tier.DEVICE
    plan.units, plan.window, plan.chunk_bytes = units, 4, 1 << 20
    return plan


def compute_seconds(options: argparse.Namespace, model: nn.Module, batches: Any) -> float:
    """Forward and backward alone, all ranks at once; the mean over ranks of each one's median."""
    taken = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        model(*next(batches)).backward()
        taken.append(time.perf_counter() - start)
        model.zero_grad()
    everywhere = torch.tensor([statistics.median(taken[1:])])
    dist.all_reduce(everywhere)
    return everywhere.item() / options.ranks


def measure_orders(rank: int, options: argparse.Namespace, model: nn.Module) -> None:
    """Ours in two orders of work, lanes throttled alike.

    A virtual machine's speed changes within minutes, so r is set anew in each round.
    """
    batches = random_batches(options, rank)
    rows = sum(p.numel() for p in model.parameters()) / options.ranks
    loops: dict[str, tuple[Step, AutoHeteWrapper]] = {}
    for strategy in ("autohete", "zero_offload"):
        twin = copy.deepcopy(model)
        plan = all_offloaded(twin, strategy)
        keywords = {"strategy": strategy, "plan": plan, "num_workers": 1}
        loops[strategy] = ours(twin, random_batches(options, rank), "16GiB", **keywords)
        run: Any = loops[strategy][1].run
        if options.link:
            for way in (CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_HOST):
                run.side.machine.set_link(way, options.link)
    steady: dict[str, list[float]] = {strategy: [] for strategy in loops}
    whole: dict[str, list[float]] = {strategy: [] for strategy in loops}
    compute: list[float] = []
    for round_number in range(options.rounds + 1):
        compute.append(compute_seconds(options, model, batches))
        for strategy, (step, trained) in loops.items():
            of_loop: Any = trained.run
            of_loop.engine.set_update_rate(rows / (options.r * compute[-1]))
            dist.barrier()
            ends = [time.perf_counter()]
            for _ in range(options.steps + 1):
                step()
                ends.append(time.perf_counter())
            trained.synchronize()
            ends.append(time.perf_counter())
            if round_number:  # the first warms up
                steady[strategy].append((ends[-2] - ends[1]) / options.steps)
                whole[strategy].append((ends[-1] - ends[0]) / (options.steps + 1))
    if rank == 0:
        print(f"{options.ranks} ranks, {rows * options.ranks / 1e6:.1f} M parameters, compute "
              f"{statistics.median(compute[1:]) * 1e3:.1f} ms, updates {options.r} of it, links "
              f"{options.link or 'not throttled'}, load {os.getloadavg()[0]:.1f}")  # fmt: skip
        for name, seconds in steady.items():
            print(f"{name:16} {statistics.median(seconds) * 1e3:8.1f} ms   from "
                  f"{min(seconds) * 1e3:.1f}   with the way from rest and back "
                  f"{statistics.median(whole[name]) * 1e3:.1f}")  # fmt: skip
        ratio = median_ratio(steady["zero_offload"], steady["autohete"])
        print(f"zero_offload / autohete {ratio:.3f}, with the way from rest and back "
              f"{median_ratio(whole['zero_offload'], whole['autohete']):.3f}")  # fmt: skip
    for _, trained in loops.values():
        trained.unwrap()


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
        print(f"{name:18} {value * 1e3:8.1f} ms   from {min(seconds[name]) * 1e3:.1f}")
    peer = seconds["fsdp2"]
    print(f"ours / fsdp2     {median_ratio(seconds['ours'], peer):.3f}")
    print(f"fsdp2 with our updates / fsdp2 {median_ratio(seconds['fsdp2, our updates'], peer):.3f}")
    share = median_ratio(seconds["fsdp2 optimizer"], peer)
    print(f"optimizer's share of fsdp2's step s = {share:.2f}")
    print({k: round(v, 3) for k, v in trained.run.engine.counters().items()})  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--gpu-mem", default="4GiB")
    parser.add_argument("--peer-adamw", choices=["fused", "default"], default="fused")
    parser.add_argument(
        "--peer-keeps-gathered", action="store_true", help="reshard_after_forward=False"
    )
    parser.add_argument("--amsgrad", action="store_true")
    parser.add_argument(
        "--half", action="store_true", help="bf16 parameters and gradients, masters in fp32"
    )
    parser.add_argument("--own-rows", action="store_true", help="whole_gradients=False")
    parser.add_argument("--r", type=float, default=0.0, help="updates over compute; two orders")
    parser.add_argument("--link", type=float, default=0.0, help="bytes a second each way, with --r")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--steady", type=int, default=16, help="steps in a row that the prediction is held against"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, f"{folder}/store"), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
