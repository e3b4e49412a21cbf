"""Limits of memory and cores, and rates of lanes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autohete import _C
from autohete.planning import available_host_bytes, hardware, measure_hardware
from autohete.planning.hardware import Lanes, available_cpus

GIB = 2**30


def machine(tmp_path: Path, files: dict[str, str]) -> dict[str, Path]:
    """A /proc and a /sys/fs/cgroup with these files; MemAvailable is 16 GiB."""
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {16 * 2**20} kB\n", **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return {"proc": tmp_path / "proc", "cgroup": tmp_path / "cg"}


def test_without_limits_it_is_what_the_kernel_says_less_headroom(tmp_path: Path) -> None:
    assert available_host_bytes(0.25, **machine(tmp_path, {})) == 12 * GIB


def test_a_v2_limit_counts_what_is_used_without_droppable_cache(tmp_path: Path) -> None:
    where = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cg/a/b/memory.max": f"{8 * GIB}\n",
            "cg/a/b/memory.current": f"{5 * GIB}\n",
            "cg/a/b/memory.stat": f"inactive_file {GIB}\n",
            "cg/a/memory.max": "max\n",
            "cg/a/memory.current": "0\n",
        },
    )
    assert available_host_bytes(0, **where) == 4 * GIB


def test_a_limit_on_an_ancestor_counts(tmp_path: Path) -> None:
    where = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cg/a/b/memory.max": "max\n",
            "cg/a/b/memory.current": "0\n",
            "cg/a/memory.max": f"{3 * GIB}\n",
            "cg/a/memory.current": f"{GIB}\n",
        },
    )
    assert available_host_bytes(0, **where) == 2 * GIB


def test_a_namespaced_cgroup_is_read_at_the_root(tmp_path: Path) -> None:
    where = machine(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "cg/memory.max": f"{2 * GIB}\n", "cg/memory.current": "0\n"},
    )
    assert available_host_bytes(0, **where) == 2 * GIB


def test_a_v1_limit_counts_and_its_no_limit_does_not(tmp_path: Path) -> None:
    where = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,memory:/job\n4:pids:/job\n",
            "cg/memory/job/memory.limit_in_bytes": f"{6 * GIB}\n",
            "cg/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
            "cg/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cg/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert available_host_bytes(0, **where) == 5 * GIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    where = machine(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "cg/memory.max": "10\n", "cg/memory.current": "20\n"},
    )
    assert available_host_bytes(0, **where) == 0


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_headroom_out_of_range_is_refused(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom is"):
        available_host_bytes(headroom)


def test_quotas_limit_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert available_cpus(**machine(tmp_path / "none", {})) == 8
    v2 = {"proc/self/cgroup": "0::/a\n", "cg/a/cpu.max": "350000 100000\n"}
    assert available_cpus(**machine(tmp_path / "v2", v2)) == 3
    free = {"proc/self/cgroup": "0::/a\n", "cg/a/cpu.max": "max 100000\n"}
    assert available_cpus(**machine(tmp_path / "free", free)) == 8
    v1 = {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
        "cg/cpu/a/cpu.cfs_quota_us": "50000\n",
        "cg/cpu/a/cpu.cfs_period_us": "100000\n",
    }
    assert available_cpus(**machine(tmp_path / "v1", v1)) == 1


class Clock:
    """Time that passes only when a lane works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def lane(self, latency: float, rate: float):
        def work(amount: int) -> None:
            self.now += latency + amount / rate

        return work


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    clock = Clock()
    monkeypatch.setattr(hardware.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(hardware, "_share", lambda work, background: 0.5)
    return Lanes(
        clock.lane(1e-5, 8e9), clock.lane(3e-5, 4e9), clock.lane(0, 1e9), clock.lane(0, 5e9)
    )


def test_rates_and_latency_are_those_of_the_lanes(clocked: Lanes, tmp_path: Path) -> None:
    found = measure_hardware(clocked, cache_dir=tmp_path)
    assert found.h2d_bytes_per_second == pytest.approx(8e9)
    assert found.d2h_bytes_per_second == pytest.approx(4e9)
    assert found.link_latency_seconds == pytest.approx(2e-5)
    assert found.cpu_params_per_second == pytest.approx(1e9)
    assert found.device_params_per_second == pytest.approx(5e9)
    assert found.h2d_share_during_d2h == 0.5


def never(amount: int) -> None:
    raise AssertionError("measured again")


def test_a_measurement_is_kept_per_device_and_read_back(clocked: Lanes, tmp_path: Path) -> None:
    first = measure_hardware(clocked, cache_dir=tmp_path)
    again = measure_hardware(Lanes(never, never, never, never), cache_dir=tmp_path)
    assert again.h2d_bytes_per_second == first.h2d_bytes_per_second
    with pytest.raises(AssertionError, match="measured again"):
        measure_hardware(Lanes(never, never, never, never), cache_dir=tmp_path, device_name="gpu")
    with pytest.raises(AssertionError, match="measured again"):
        measure_hardware(Lanes(never, never, never, never), cache_dir=tmp_path, refresh=True)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 99, "hardware": {}}', "\x00"])
def test_a_damaged_cache_is_measured_again(clocked: Lanes, tmp_path: Path, text: str) -> None:
    measure_hardware(clocked, cache_dir=tmp_path)
    kept = next(tmp_path.iterdir())
    kept.write_text(text)
    measure_hardware(clocked, cache_dir=tmp_path)
    assert json.loads(kept.read_text())["hardware"]["h2d_bytes_per_second"] > 0


def test_real_lanes_give_rates_a_profile_accepts(tmp_path: Path) -> None:
    source = bytes(1 << 20)

    def copy(amount: int) -> None:
        for _ in range(max(1, amount >> 20)):
            bytearray(source)

    told: list[str] = []
    lanes = Lanes(copy, copy, copy, copy, largest_bytes=4 << 20, num_parameters=4 << 20)
    found = measure_hardware(lanes, cache_dir=tmp_path, progress=told.append)
    _C.validate_hardware(found)
    assert len(told) == 4


def test_a_lane_that_fails_in_the_background_fails_the_measurement() -> None:
    def fail() -> None:
        raise OSError("link down")

    with pytest.raises(OSError, match="link down"):
        hardware._share(lambda: None, fail)
