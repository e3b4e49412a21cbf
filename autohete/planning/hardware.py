"""What this machine has and how fast it is: memory free under every limit, rates of lanes.

Rates are measured once per machine and kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autohete import _C
from autohete.planning.profile_file import write_atomically

HEADROOM = 0.1  # of the host memory, left to the rest of the process and the machine
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_CACHE_VERSION = 1
_MOST_SECONDS = 0.4  # on one rate, so that all take under 20 s on a slow or busy machine


# ---- memory and cores


def available_host_bytes(
    headroom: float = HEADROOM, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the host bytes that may be used now: the kernel's estimate and every cgroup's limit.

    Args:
        headroom: share to leave alone.
        proc, cgroup: where the two file systems are mounted.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is {headroom!r}, expected at least 0 and below 1")
    free = [_mem_available(proc), *(limit - used for limit, used in _cgroup_memory(proc, cgroup))]
    return int(max(0, min(free)) * (1 - headroom))


def available_cpus(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores this process may use: its affinity and its cgroups' quotas, at least 1."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        cores = float(os.cpu_count() or 1)
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [
                _read(folder / "cpu.cfs_quota_us").strip(),
                _read(folder / "cpu.cfs_period_us").strip(),
            ]
        if all(word.isdigit() for word in words) and int(words[1]) > 0:
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(1, int(cores))


def _mem_available(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // 2  # not Linux: half of what there is


def _cgroup_memory(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used) of the process's cgroup and all above it, where a limit is set."""
    found = []
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                found.append((int(limit), max(0, int(used) - _reclaimable(folder))))
    return found


def _reclaimable(folder: Path) -> int:
    """Page cache the kernel drops first; it counts as used but is free for the asking."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The process's cgroup and its ancestors, of the v2 tree and the v1 tree of a controller."""
    folders: list[Path] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if number == "0" and not controllers:
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        place = root / inside.lstrip("/")
        while place != root and root in place.parents:
            folders.append(place)
            place = place.parent
        folders.append(root)
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# ---- rates


@dataclass(frozen=True)
class Lanes:
    """How to keep each lane busy for a while. Each function works and returns when it is done."""

    copy_to_device: Callable[[int], None]
    """Move this many bytes host to device."""
    copy_to_host: Callable[[int], None]
    update_on_cpu: Callable[[int], None]
    """One AdamW step over this many parameters, with all workers."""
    update_on_device: Callable[[int], None]
    largest_bytes: int = 64 << 20
    num_parameters: int = 4_000_000


def measure_hardware(
    lanes: Lanes,
    *,
    device_name: str = "host device",
    cache_dir: Path | None = None,
    refresh: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> _C.HardwareProfile:
    """Return the rates of the four lanes alone and of those that share something together.

    Takes a few seconds the first time, then reads the cache.

    Args:
        device_name: part of the cache's key, with this machine's name, processor and cores.
        cache_dir: where to keep the result; None for the user's cache directory.
        refresh: measure even if a result is kept.
        progress: told what is being measured.
    """
    path = cache_path(device_name, cache_dir)
    kept = None if refresh else _read_cache(path)
    if kept is not None:
        return kept
    hardware = _measure(lanes, progress)
    _write_cache(path, hardware)
    return hardware


def _measure(lanes: Lanes, progress: Callable[[str], None]) -> _C.HardwareProfile:
    hardware = _C.HardwareProfile()
    small, large = 64 << 10, lanes.largest_bytes
    progress("link, host to device")
    latency_up, up = _line(lanes.copy_to_device, small, large)
    progress("link, device to host")
    latency_down, down = _line(lanes.copy_to_host, small, large)
    hardware.h2d_bytes_per_second, hardware.d2h_bytes_per_second = up, down
    hardware.link_latency_seconds = (latency_up + latency_down) / 2
    progress("AdamW on the CPU and on the device")
    parameters = lanes.num_parameters
    hardware.cpu_params_per_second = parameters / shortest_seconds(lanes.update_on_cpu, parameters)
    hardware.device_params_per_second = parameters / shortest_seconds(
        lanes.update_on_device, parameters
    )
    progress("lanes together")

    def to_device() -> None:
        lanes.copy_to_device(large)

    def to_host() -> None:
        lanes.copy_to_host(large)

    def update() -> None:
        lanes.update_on_cpu(parameters)

    hardware.h2d_share_during_d2h = _share(to_device, to_host)
    hardware.d2h_share_during_h2d = _share(to_host, to_device)
    hardware.copy_share_during_cpu = _share(to_device, update)
    hardware.cpu_share_during_copy = _share(update, to_device)
    return hardware


def shortest_seconds(work: Callable[[int], None], amount: int = 0, repeats: int = 5) -> float:
    """Return the shortest of a few runs after one that warms up; fewer where they take long."""
    work(amount)
    best, begin = float("inf"), time.perf_counter()
    for _ in range(repeats):
        start = time.perf_counter()
        work(amount)
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > _MOST_SECONDS:
            break
    return max(best, 1e-9)


def _line(work: Callable[[int], None], small: int, large: int) -> tuple[float, float]:
    """Latency and rate of t = latency + bytes / rate through two sizes."""
    at_small, at_large = shortest_seconds(work, small), shortest_seconds(work, large)
    rate = (large - small) / max(at_large - at_small, 1e-9)
    return max(0.0, at_small - small / rate), rate


def _share(work: Callable[[], None], background: Callable[[], None], repeats: int = 5) -> float:
    """The share of its speed that `work` keeps while `background` goes on in another thread."""
    alone = shortest_seconds(lambda _: work(), 0, repeats)
    stop, started = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def keep_busy() -> None:
        try:
            while not stop.is_set():
                background()
                started.set()
        except BaseException as error:
            failed.append(error)
            started.set()

    thread = threading.Thread(target=keep_busy, name="autohete-measure")
    thread.start()
    try:
        started.wait()
        together = shortest_seconds(lambda _: work(), 0, repeats)
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return min(1.0, max(0.05, alone / together))


# ---- cache


def cache_path(device_name: str, cache_dir: Path | None) -> Path:
    """Return where what is measured of this machine with this device is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "autohete" if cache_dir is None else cache_dir
    machine = "|".join(
        (platform.node(), platform.machine(), _processor(), str(available_cpus()), device_name)
    )
    return folder / f"hardware-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


_FIELDS = tuple(name for name in dir(_C.HardwareProfile) if not name.startswith("_"))


def _read_cache(path: Path) -> _C.HardwareProfile | None:
    """What is kept, or None when there is none that can be used."""
    hardware = _C.HardwareProfile()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != _CACHE_VERSION:
            return None
        for field in _FIELDS:
            setattr(hardware, field, float(kept["hardware"][field]))
        _C.validate_hardware(hardware)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hardware


def _write_cache(path: Path, hardware: _C.HardwareProfile) -> None:
    rates = {field: getattr(hardware, field) for field in _FIELDS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"version": _CACHE_VERSION, "hardware": rates}, indent=1))
    except OSError:
        return  # a home that cannot be written: measured again next time
