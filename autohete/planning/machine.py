"""What `autohete profile --hardware` measures of this machine: memory, links, CPU AdamW, pinning.

Where torch sees a GPU its links are measured; elsewhere the host device's copies, which are memory
copies. The rates a plan needs go through measure_hardware(); what else is of interest is kept
beside them. Everything is kept per machine; a first run takes some seconds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from autohete import _C
from autohete.planning.hardware import (
    Lanes,
    available_cpus,
    available_host_bytes,
    cache_path,
    measure_hardware,
    shortest_seconds,
)
from autohete.planning.profile_file import write_atomically
from autohete.planning.sizes import format_bytes

_VERSION = 1
_LARGEST = 64 << 20
_LINK_SIZES = tuple(1 << power for power in range(12, 27, 2))  # 4 KiB .. 64 MiB
_NUM_PARAMETERS = 4_000_000


@dataclass(frozen=True)
class MachineReport:
    """Rates per second. Pairs of lists and maps are JSON's."""

    device: str
    cpus: int
    host_bytes: int
    """Free now, under every limit, less headroom; not kept, looked up each time."""
    device_bytes: int
    """Free now; 0 without a GPU."""
    dram_bytes_per_second: float
    """Read and written by a copy with all workers."""
    pin_seconds_per_gib: float
    """To get a GiB of pinned memory (without a GPU: to touch a fresh GiB)."""
    adamw_params_per_second: dict[str, float]
    """Number of worker threads -> CPU AdamW."""
    h2d_by_size: dict[str, float]
    """Bytes of one copy -> bytes per second."""
    d2h_by_size: dict[str, float]
    hardware: dict[str, float]
    """The planner's rates and shares."""

    def __str__(self) -> str:
        h = self.hardware
        rows = [
            f"{self.device}, {self.cpus} CPUs, host memory {format_bytes(self.host_bytes)} free"
            + (
                f", device memory {format_bytes(self.device_bytes)} free"
                if self.device_bytes
                else ""
            ),
            f"DRAM {self.dram_bytes_per_second / 1e9:.1f} GB/s; "
            f"a GiB of pinned memory takes {self.pin_seconds_per_gib * 1e3:.0f} ms",
            "CPU AdamW by threads: "
            + ", ".join(
                f"{n}: {rate / 1e9:.2f}e9/s" for n, rate in self.adamw_params_per_second.items()
            ),
            f"{'copy of':>10}{'up':>12}{'down':>12}",
        ]
        for size, up in self.h2d_by_size.items():
            down = self.d2h_by_size[size]
            rows.append(
                f"{format_bytes(int(size)):>10}{up / 1e9:>7.2f} GB/s{down / 1e9:>7.2f} GB/s"
            )
        rows.append(
            "keeps of its speed: up while down "
            f"{h['h2d_share_during_d2h']:.0%}, down while up {h['d2h_share_during_h2d']:.0%}, "
            f"copies while AdamW {h['copy_share_during_cpu']:.0%}, "
            f"AdamW while copies {h['cpu_share_during_copy']:.0%}"
        )
        return "\n".join(rows)


def measure_machine(
    *,
    cache_dir: Path | None = None,
    refresh: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> MachineReport:
    """Return what this machine has and how fast it is, measured or as kept; see MachineReport."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "host device"
    path = cache_path(f"{device}|report", cache_dir)
    kept = None if refresh else _read(path)
    if kept is None:
        kept = _measure(device, cuda, cache_dir, refresh, progress)
        _write(path, kept)
    free = int(torch.cuda.mem_get_info()[0]) if cuda else 0
    return MachineReport(
        device=device,
        cpus=available_cpus(),
        host_bytes=available_host_bytes(),
        device_bytes=free,
        **kept,
    )


def _measure(
    device: str,
    cuda: bool,
    cache_dir: Path | None,
    refresh: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    num_workers = available_cpus()
    workers = _C.Workers(num_workers)
    lanes = _cuda_lanes(workers) if cuda else _host_lanes(workers)
    hardware = measure_hardware(
        lanes, device_name=device, cache_dir=cache_dir, refresh=refresh, progress=progress
    )
    progress("links by size of copy")
    by_size = [
        {str(size): size / shortest_seconds(copy, size) for size in _LINK_SIZES}
        for copy in (lanes.copy_to_device, lanes.copy_to_host)
    ]
    progress("CPU AdamW by threads")
    adamw = {
        str(n): _NUM_PARAMETERS / shortest_seconds(_adamw(_C.Workers(n)))
        for n in _powers(num_workers)
    }
    progress("DRAM and pinned memory")
    names = [name for name in dir(_C.HardwareProfile) if not name.startswith("_")]
    return {
        "dram_bytes_per_second": _dram(workers),
        "pin_seconds_per_gib": _pin_seconds(cuda),
        "adamw_params_per_second": adamw,
        "h2d_by_size": by_size[0],
        "d2h_by_size": by_size[1],
        "hardware": {name: float(getattr(hardware, name)) for name in names},
    }


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


def _adamw(workers: _C.Workers) -> Callable[[int], None]:
    """One step over _NUM_PARAMETERS parameters, whatever number it is called with."""
    hyper = _C.AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    grad, param, exp_avg = (torch.full((_NUM_PARAMETERS,), 1e-3) for _ in range(3))
    exp_avg_sq = torch.full((_NUM_PARAMETERS,), 1e-3)
    updates = [(hyper, 1.0, grad, param, exp_avg, exp_avg_sq, None, None)]

    def update(num_parameters: int) -> None:
        _C.adamw_(workers, updates)

    return update


def _host_lanes(workers: _C.Workers) -> Lanes:
    """Copies between two parts of host memory by one thread each, as the host device makes them."""
    alone = _C.Workers(1)
    update = _adamw(workers)
    buffers = [torch.zeros(_LARGEST, dtype=torch.uint8) for _ in range(4)]

    def up(size: int) -> None:
        _C.copy_(alone, buffers[1][:size], buffers[0][:size])

    def down(size: int) -> None:
        _C.copy_(alone, buffers[3][:size], buffers[2][:size])

    return Lanes(up, down, update, update, largest_bytes=_LARGEST, num_parameters=_NUM_PARAMETERS)


def _cuda_lanes(workers: _C.Workers) -> Lanes:
    host = [torch.zeros(_LARGEST, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(_LARGEST, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    update = _adamw(workers)
    params = [torch.nn.Parameter(torch.zeros(_NUM_PARAMETERS, device="cuda"))]
    params[0].grad = torch.zeros_like(params[0])
    on_device = torch.optim.AdamW(params, fused=True)

    def copy(i: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(streams[i]):
            dst.copy_(src, non_blocking=True)
        streams[i].synchronize()

    def device_update(num_parameters: int) -> None:
        on_device.step()
        torch.cuda.synchronize()

    return Lanes(
        lambda size: copy(0, device[0][:size], host[0][:size]),
        lambda size: copy(1, host[1][:size], device[1][:size]),
        update,
        device_update,
        largest_bytes=_LARGEST,
        num_parameters=_NUM_PARAMETERS,
    )


def _dram(workers: _C.Workers) -> float:
    src = torch.zeros(256 << 20, dtype=torch.uint8)
    dst = torch.ones_like(src)
    return 2 * src.numel() / shortest_seconds(lambda _: _C.copy_(workers, dst, src))


def _pin_seconds(cuda: bool) -> float:
    size = 256 << 20
    start = time.perf_counter()
    if cuda:
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
    else:
        torch.empty(size, dtype=torch.uint8).fill_(1)
    return (time.perf_counter() - start) * 2**30 / size


_KEPT = {f.name for f in fields(MachineReport)} - {"device", "cpus", "host_bytes", "device_bytes"}


def _read(path: Path) -> dict[str, Any] | None:
    """What is kept, or None when it cannot be used."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != _VERSION or set(kept["report"]) != _KEPT:
            return None
        report: dict[str, Any] = kept["report"]
        str(MachineReport("", 1, 0, 0, **report))
        if not all(math.isfinite(figure) and figure >= 0 for figure in _figures(report)):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return report


def _figures(report: dict[str, Any]) -> Iterator[float]:
    for value in report.values():
        yield from value.values() if isinstance(value, dict) else (value,)


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": _VERSION, "report": report}, indent=1))
    except OSError:
        return  # a home that cannot be written: measured again next time


def report_to_dict(report: MachineReport) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    return asdict(report)
