"""Workers: sizing, sharing, forks. What they compute is tested with the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from autohete import _C


def make_tree(root: Path, groups: str, files: dict[str, str]) -> str:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/\n", {}, 0),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        # The tightest of the groups on the way up counts.
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
            },
            2,
        ),
        # A container sees its own group at the mount point, under the host's name for it.
        ("0::/docker/77\n", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (
            "4:memory:/x\n3:cpu,cpuacct:/job\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            6,
        ),
        (
            "1:cpu:/\n0::/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0,
        ),
        ("1:cpuset:/\n", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000"}, 0),
    ],
)
def test_the_quota_is_that_of_the_tightest_cgroup(
    tmp_path: Path, groups: str, files: dict[str, str], cpus: int
) -> None:
    assert _C.cgroup_cpu_quota(make_tree(tmp_path, groups, files)) == cpus


def test_no_cgroup_files_at_all_mean_no_limit(tmp_path: Path) -> None:
    assert _C.cgroup_cpu_quota(str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("affinity", "quota", "ranks", "threads"),
    [
        (64, 0, None, 64), (12, 4, None, 4), (2, 4, None, 2), (64, 0, "8", 8), (12, 4, "8", 1),
        (8, 0, "3", 2), (4, 0, "", 4), (4, 0, "0", 4), (4, 0, "-2", 4), (4, 0, "x", 4),
    ],
)  # fmt: skip
def test_a_rank_gets_its_part_of_what_is_allowed(
    affinity: int, quota: int, ranks: str | None, threads: int
) -> None:
    assert _C.cpus_for_rank(affinity, quota, ranks) == threads


ASK = "import torch; from autohete import _C; print(_C.default_num_workers())"


def test_affinity_counts_and_omp_num_threads_does_not() -> None:
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + ASK
    run = [sys.executable, "-c", program]
    env = {k: v for k, v in os.environ.items() if k != "LOCAL_WORLD_SIZE"}
    assert subprocess.run(run, capture_output=True, text=True, env=env).stdout.strip() == "1"
    ask = [sys.executable, "-c", ASK]
    free = subprocess.run(ask, capture_output=True, text=True, env=env).stdout
    assert free.strip().isdigit()
    env["OMP_NUM_THREADS"] = "1"
    assert subprocess.run(ask, capture_output=True, text=True, env=env).stdout == free


def test_fewer_than_one_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0, expected at least 1"):
        _C.Workers(0)


def test_torchs_thread_settings_are_untouched() -> None:
    before = torch.get_num_threads()
    _C.squared_norm(_C.Workers(7), torch.ones(200_000))
    assert torch.get_num_threads() == before


def test_threads_share_the_workers_and_each_gets_its_own_result() -> None:
    workers = _C.Workers(3)
    wrong: list[int] = []

    def use(seed: int) -> None:
        values = torch.full((150_000,), float(seed))
        for _ in range(20):
            if _C.squared_norm(workers, values).grad_sq_norm != 150_000.0 * seed**2:
                wrong.append(seed)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("num_tiles", [0, 1, 2, 200])
def test_every_tile_runs_exactly_once(num_workers: int, num_tiles: int) -> None:
    ran: list[int] = []
    _C.Workers(num_workers).for_each_tile(num_tiles, ran.append)
    assert sorted(ran) == list(range(num_tiles))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_the_first_error_is_raised_no_tile_runs_after_it_and_the_workers_go_on(
    num_workers: int,
) -> None:
    workers = _C.Workers(num_workers)
    running: set[int] = set()
    late: list[int] = []

    def body(tile: int) -> None:
        running.add(tile)
        if tile == 7:
            raise KeyError("tile seven")
        running.discard(tile)

    with pytest.raises(KeyError, match="tile seven"):
        workers.for_each_tile(1000, body)
    assert running == {7}  # those that had started have ended
    workers.for_each_tile(50, late.append)
    assert sorted(late) == list(range(50))


def test_a_tile_may_use_the_workers_itself() -> None:
    workers = _C.Workers(3)
    ran: list[tuple[int, int]] = []
    workers.for_each_tile(6, lambda i: workers.for_each_tile(6, lambda j: ran.append((i, j))))
    assert sorted(ran) == [(i, j) for i in range(6) for j in range(6)]


def test_a_caller_whose_workers_are_all_busy_does_its_tiles_itself() -> None:
    workers = _C.Workers(2)
    hold, held = threading.Event(), threading.Barrier(3)

    def block(_: int) -> None:
        held.wait()  # both threads of the workers are inside a tile
        hold.wait()

    blocker = threading.Thread(target=workers.for_each_tile, args=(2, block))
    blocker.start()
    held.wait()
    ran: list[int] = []
    workers.for_each_tile(20, ran.append)  # would never return if it waited for a worker
    assert sorted(ran) == list(range(20))
    hold.set()
    blocker.join()


FORK = """
import os, torch
from autohete import _C
workers, values = _C.Workers(4), torch.ones(500_000)
assert _C.squared_norm(workers, values).grad_sq_norm == 500_000
child = os.fork()
if child == 0:
    ok = _C.squared_norm(workers, values).grad_sq_norm == 500_000
    del workers                                             # must not wait for the parent's threads
    ok = ok and _C.squared_norm(_C.Workers(1), values).grad_sq_norm == 500_000
    os._exit(0 if ok else 1)
status = os.waitpid(child, 0)[1]
assert _C.squared_norm(workers, values).grad_sq_norm == 500_000
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_works_on_and_the_parent_too() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "0", result.stderr


def test_a_process_with_used_workers_ends() -> None:
    program = (
        "import torch; from autohete import _C; w = _C.Workers(4)\n"
        "_C.squared_norm(w, torch.ones(500_000))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert run.returncode == 0 and run.stderr == b""
