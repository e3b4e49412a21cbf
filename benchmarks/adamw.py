"""How fast the CPU AdamW is, beside torch, DeepSpeed and the memory itself.

Everything is measured in one process, interleaved: each round runs every competitor once, and the
medians of the rounds are compared. The table ends with how busy the machine was.

Everybody has the memory that they have in use. CPUAdamW's parameters and gradients are torch's and
its state its own, on huge pages, each stream beginning apart; the one-pass rows are the engine's
update, whose streams are all of the latter kind. Those of the peers and of the yardstick lie where
torch and DeepSpeed put them. With --our-memory all streams of all of them are as the engine's.

    python benchmarks/adamw.py                           # peers that are installed
    python benchmarks/adamw.py --yardstick stream.cpp    # and plain memory streams, see --help
    python benchmarks/adamw.py --our-memory              # peers in memory like the engine's
    THP_MEM_ALLOC_ENABLE=1 python benchmarks/adamw.py    # torch's memory on huge pages too
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autohete import _C
from autohete.optim import CPUAdamW

Competitor = tuple[str, Callable[[], object]]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


Times = tuple[float, float]  # median and best, in milliseconds


WARM_SECONDS = 0.02  # libgomp's threads spin for 5 to 7 ms after a loop


def warm(run: Callable[[], object]) -> None:
    """Run untimed until nothing of whoever came before is left on a core or in the caches."""
    begun = time.perf_counter()
    while True:
        run()
        if time.perf_counter() - begun > WARM_SECONDS:
            return


class OtherWork:
    """What other processes take of the CPUs, between two looks."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> float:
        """Return the CPUs that others kept busy since the last look."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # not idle, not iowait
        now, own = time.perf_counter(), time.process_time()
        before = getattr(self, "_last", (now, 0.0, 0.0))
        self._last = (now, busy, own)
        elapsed = now - before[0]
        return max(0.0, (busy - before[1]) - (own - before[2])) / elapsed if elapsed else 0.0


def measure(
    competitors: list[Competitor],
    rounds: int,
    repeat: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    patience: float = 0.0,
) -> dict[str, Times]:
    """Return each competitor's median and best time; the order turns from round to round.

    Each runs untimed for a while before it is timed: OpenMP's threads spin on for milliseconds
    after a loop, on a core that the next one's threads would need.
    Sleeps and goes on for up to `patience` seconds until other processes took less than a tenth of
    a CPU during `rounds` rounds; the quietest rounds count.
    """
    for _, run in competitors:
        run()
    taken: list[tuple[float, dict[str, float]]] = []  # what others did, and our times
    others, begun, quiet = OtherWork(), time.perf_counter(), 0
    while len(taken) < rounds or (quiet < rounds and time.perf_counter() - begun < patience):
        while time.perf_counter() - begun < patience:
            others.look()
            time.sleep(0.2)
            if others.look() < 0.1:
                break
        times: dict[str, float] = {}
        for i in range(len(competitors)):
            name, run = competitors[(i + len(taken)) % len(competitors)]
            warm(run)
            start = clock()
            for _ in range(repeat):
                run()
            times[name] = (clock() - start) / repeat * 1e3
        taken.append((others.look(), times))
        quiet += taken[-1][0] < 0.1
    taken.sort(key=lambda pair: pair[0])
    used = taken[:rounds]
    print(f"\n{rounds} of {len(taken)} rounds; others kept {used[0][0]:.2f} to {used[-1][0]:.2f} "
          f"CPUs busy in them, {taken[-1][0]:.2f} at most")  # fmt: skip
    result: dict[str, Times] = {}
    for name, _ in competitors:
        values = [times[name] for _, times in used]
        result[name] = (statistics.median(values), min(values))
    return result


def table(title: str, times: dict[str, Times], ours: str) -> None:
    """Print medians and best times, and both as multiples of ours (above 1: ours is faster)."""
    print(f"\n### {title}\n")
    print(
        "| | median ms | best ms | median / ours | best / ours |\n| --- | --- | --- | --- | --- |"
    )
    for name, (median, best) in times.items():
        print(f"| {name} | {median:.3g} | {best:.3g} "
              f"| {median / times[ours][0]:.2f} | {best / times[ours][1]:.2f} |")  # fmt: skip


def streams(numel: int, *dtypes: torch.dtype, ours: bool = True) -> list[Tensor]:
    """Return tensors with undefined values, in the engine's kind of memory or in torch's."""
    made: list[Tensor] = []
    for dtype in dtypes:
        tensor = torch.empty(numel, dtype=dtype)
        if ours:
            _C.begin_apart(tensor, made)
        made.append(tensor)
    return made


def yardstick(source: str | None, numel: int, threads: int, ours: bool) -> list[Competitor]:
    """Compile the stream loops; the limit is a loop that reads 4 fp32 streams and writes 3."""
    if source is None:
        return []
    folder = tempfile.mkdtemp()
    library = f"{folder}/libstream.so"
    flags = ["-O3", "-std=c++17", "-march=native", "-fPIC", "-fopenmp", "-shared"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    stream = ctypes.CDLL(library)
    # Written once, or the gradient would be the zero page over and over.
    arrays = [tensor.fill_(1e-3) for tensor in streams(numel, *[torch.float32] * 4, ours=ours)]
    pointers = [ctypes.c_void_p(a.data_ptr()) for a in arrays]
    n = ctypes.c_size_t(numel)

    def halves() -> object:
        return stream.s_r4w3(*pointers, n, threads, 0), arrays

    def tiles() -> object:
        return stream.s_r4w3_tile(*pointers, n, threads, ctypes.c_size_t(65536)), arrays

    return [("yardstick (read 4, write 3)", halves), ("yardstick in tiles", tiles)]


def parameters(sizes: list[int], ours: bool = False) -> list[torch.nn.Parameter]:
    made = []
    for size in sizes:
        value, grad = streams(size, torch.float32, torch.float32, ours=ours)
        p = torch.nn.Parameter(value.normal_())
        p.grad = grad.normal_(std=1e-2)
        made.append(p)
    return made


def in_our_memory(optimizer: Any) -> Any:
    """Make a peer's state and give it the engine's kind of memory."""
    optimizer.step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            others = [p, p.grad]
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    _C.begin_apart(value, others)
                    others.append(value.zero_())
    return optimizer


def deepspeed_adam(params: list[torch.nn.Parameter]) -> Any | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam(params, adamw_mode=True)


def fp32_step(
    sizes: list[int],
    workers: _C.Workers,
    stick: Callable[[], list[Competitor]] = list,
    foreach: bool = True,
    our_memory: bool = False,
) -> list[Competitor]:
    """Return plain fp32 optimizers, each with tensors of its own."""
    moved = in_our_memory if our_memory else (lambda optimizer: optimizer)

    def params() -> list[torch.nn.Parameter]:
        return parameters(sizes, our_memory)

    ours = CPUAdamW(params(), num_workers=workers.num_workers)
    fused = moved(torch.optim.AdamW(params(), fused=True))
    competitors: list[Competitor] = [("autohete CPUAdamW", ours.step), ("torch fused", fused.step)]
    if foreach:
        competitors.append(("torch foreach", moved(torch.optim.AdamW(params(), foreach=True)).step))
    if (peer := deepspeed_adam(params())) is not None:
        competitors.append(("DeepSpeedCPUAdam", moved(peer).step))
    return competitors + stick()


def separate_passes(optimizer: Any, numel: int, ours: bool) -> Callable[[], None]:
    """Return a bf16 step as others make it: widen, unscale and clip, update, round."""
    master = optimizer.param_groups[0]["params"][0]
    grad, half = streams(numel, torch.bfloat16, torch.bfloat16, ours=ours)
    grad.normal_()

    def step() -> None:
        master.grad.copy_(grad)
        master.grad.mul_(0.5)
        optimizer.step()
        half.copy_(master.detach())

    return step


def one_pass(
    numel: int,
    workers: _C.Workers,
    out: bool = False,
    edits: bool = True,
    by_products: bool = False,
) -> Callable[[], Any]:
    """Return the engine's bf16 step: bf16 gradient in, bf16 copy out, in memory of its kind."""
    hyper = _C.AdamHyper(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_scale=0.5
    )
    half_dtype, fp32 = torch.bfloat16, torch.float32
    param, exp_avg, exp_avg_sq, grad, copy, *new = streams(
        numel, fp32, fp32, fp32, half_dtype, half_dtype, *([fp32] * 3 if out else [])
    )
    for tensor in (exp_avg, exp_avg_sq, *new):
        tensor.zero_()
    copy.copy_(param.normal_())
    half = copy if edits else None
    update = (hyper, 3.0, grad.normal_(), param, exp_avg, exp_avg_sq, None, half)
    there = [tuple(new)] if out else None
    return lambda: _C.adamw_(workers, [update], out=there, by_products=by_products)


def half_step(
    numel: int, workers: _C.Workers, stick: Callable[[], list[Competitor]], our_memory: bool
) -> list[Competitor]:
    moved = in_our_memory if our_memory else (lambda optimizer: optimizer)
    fused = moved(torch.optim.AdamW(parameters([numel], our_memory), fused=True))
    competitors = [
        ("autohete, one pass", one_pass(numel, workers)),
        ("the same with norm and hash", one_pass(numel, workers, by_products=True)),
        ("torch fused, separate passes", separate_passes(fused, numel, our_memory)),
    ]
    if (peer := deepspeed_adam(parameters([numel], our_memory))) is not None:
        passes = separate_passes(moved(peer), numel, our_memory)
        competitors.append(("DeepSpeed, separate passes", passes))
    return competitors + stick()


def moments(numel: int, workers: _C.Workers) -> list[Competitor]:
    """Return fp32 steps that keep their moments in fp32 and in bf16."""
    made: list[Competitor] = []
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = CPUAdamW(
            parameters([numel]), num_workers=workers.num_workers, moment_dtype=dtype
        )
        made.append((f"moments in {dtype}", optimizer.step))
    return made


def in_and_out_of_place(numel: int, workers: _C.Workers) -> list[Competitor]:
    return [
        ("in place", one_pass(numel, workers, edits=False)),
        ("out of place", one_pass(numel, workers, out=True, edits=False)),
        ("in place, norm and hash", one_pass(numel, workers, edits=False, by_products=True)),
        (
            "out of place, norm and hash",
            one_pass(numel, workers, out=True, edits=False, by_products=True),
        ),
    ]


def levels(numel: int, workers: _C.Workers) -> list[Competitor]:
    hyper = _C.AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    state: list[Tensor] = [torch.randn(numel), torch.zeros(numel), torch.zeros(numel)]
    update = (hyper, 3.0, torch.randn(numel), *state, None, None)

    def at(level: str) -> Callable[[], Any]:
        return lambda: _C.adamw_(workers, [update], level=level, by_products=False)

    return [(level, at(level)) for level in reversed(_C.cpu_features()["supported"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds that each table may wait for rounds without other processes",
    )
    parser.add_argument("--yardstick", help="C++ source with s_r4w3(p, m, v, g, n, threads, 0)")
    parser.add_argument(
        "--our-memory",
        action="store_true",
        help="peers and yardstick too have memory as the engine's: huge pages, streams apart",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="one thread, processor time instead of wall time: for machines that others use too",
    )
    parser.add_argument("--only", nargs="*", help="tables whose titles contain one of these")
    args = parser.parse_args()
    clock = time.process_time if args.alone else time.perf_counter
    if args.alone:
        torch.set_num_threads(1)
    workers = _C.Workers(1 if args.alone else _C.default_num_workers())
    print(f"{cpu_name()}, {_C.cpu_features()}, {workers.num_workers} workers, torch "
          f"{torch.__version__} with {torch.get_num_threads()} threads, "
          f"load before: {os.getloadavg()[0]:.2f}")  # fmt: skip

    def compare(title: str, make: Callable[[], list[Competitor]], repeat: int = 1) -> None:
        if args.only and not any(word in title for word in args.only):
            return
        competitors = make()
        times = measure(competitors, args.rounds, repeat, clock, args.patience)
        table(title, times, ours=competitors[0][0])

    for n in args.numel:
        stick = partial(yardstick, args.yardstick, n, workers.num_workers, args.our_memory)
        size = f"{n:,} parameters"
        compare(
            f"{size}, fp32", partial(fp32_step, [n], workers, stick, our_memory=args.our_memory)
        )
        compare(
            f"{size}, bf16 gradient and copy, fp32 master",
            partial(half_step, n, workers, stick, args.our_memory),
        )
        compare(
            f"{size}, bf16 gradient, in and out of place", partial(in_and_out_of_place, n, workers)
        )
        compare(f"{size}, bf16 moments", partial(moments, n, workers))
    for each in (10_000, 3000, 1000, 100, 10):
        compare(f"1000 tensors of {each:,}, fp32", partial(fp32_step, [each] * 1000, workers))
    compare("10,000,000 parameters by instruction set", partial(levels, 10_000_000, workers))
    compare("100,000 (in cache) by instruction set", partial(levels, 100_000, workers), repeat=20)
    print(f"\nload after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
