"""How fast copies, casts and norms are, beside torch's own, and where the crossovers lie.

Interleaved in one process, medians of the rounds; times are per call.

    python benchmarks/copies.py
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Callable

import torch
from adamw import cpu_name, measure, table

from autohete import _C


def copies(
    num_bytes: int, workers: _C.Workers, alone: _C.Workers
) -> dict[str, Callable[[], object]]:
    src = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    dst = torch.zeros_like(src)
    return {
        "autohete copy_": lambda: _C.copy_(workers, dst, src),
        "on the caller alone": lambda: _C.copy_(alone, dst, src),
        "torch copy_": lambda: dst.copy_(src),
    }


def units(width: int, workers: _C.Workers) -> dict[str, Callable[[], object]]:
    """A transformer layer's parameters into a slot: what one copy and kept slots are worth."""
    sizes = (3 * width * width, width * width, 4 * width * width, 4 * width * width)
    sizes += (3 * width, width, 4 * width, width, width, width, width, width)  # biases, norms
    src = torch.randn(sum(sizes))
    kept = torch.zeros_like(src)
    parts = list(zip(kept.split(sizes), src.split(sizes), strict=True))

    def into_new_memory() -> None:
        with mmap.mmap(-1, src.nbytes) as memory:
            dst = torch.frombuffer(memory, dtype=torch.float32)
            _C.copy_(workers, dst, src)
            del dst

    return {
        "one copy, slot kept": lambda: _C.copy_(workers, kept, src),
        "a copy per parameter": lambda: [_C.copy_(workers, *part) for part in parts],
        "one copy, new memory each time": into_new_memory,
    }


def casts(
    numel: int, workers: _C.Workers, src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    src = torch.randn(numel).to(src_dtype)
    dst = torch.zeros(numel, dtype=dst_dtype)
    return {
        "autohete cast_": lambda: _C.cast_(workers, dst, src),
        "torch copy_": lambda: dst.copy_(src),
    }


def norms(numel: int, workers: _C.Workers, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x = torch.randn(numel).to(dtype)
    norm = torch.linalg.vector_norm
    competitors: dict[str, Callable[[], object]] = {
        "autohete squared_norm (double)": lambda: _C.squared_norm(workers, x),
        "torch vector_norm": lambda: norm(x),
    }
    if dtype != torch.float32:
        competitors["torch vector_norm, dtype=float32"] = lambda: norm(x, dtype=torch.float32)
    return competitors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--numel", type=int, default=10_000_000, help="of casts and norms")
    args = parser.parse_args()
    workers, alone = _C.Workers(_C.default_num_workers()), _C.Workers(1)
    print(f"{cpu_name()}, {_C.cpu_features()}, torch {torch.__version__} with "
          f"{torch.get_num_threads()} threads, load before: {os.getloadavg()[0]:.2f}")  # fmt: skip
    for kib in (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072):
        competitors = copies(kib * 1024, workers, alone)
        repeat = max(1, 16384 // kib)
        medians = measure(list(competitors.items()), args.rounds, repeat)
        table(f"copy of {kib} KiB", medians, "autohete copy_")
    for width in (128, 512, 1024, 2048):
        medians = measure(list(units(width, workers).items()), args.rounds, 2048 // width)
        table(f"parameters of a layer of width {width}", medians, next(iter(medians)))
    for half in (torch.bfloat16, torch.float16):
        for pair in ((torch.float32, half), (half, torch.float32)):
            competitors = casts(args.numel, workers, *pair)
            title = f"cast of {args.numel:,} values, {pair[0]} to {pair[1]}"
            table(title, measure(list(competitors.items()), args.rounds), "autohete cast_")
    for dtype in (torch.float32, torch.bfloat16):
        medians = measure(list(norms(args.numel, workers, dtype).items()), args.rounds)
        table(f"norm of {args.numel:,} values, {dtype}", medians, next(iter(medians)))
    print(f"\nload after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
