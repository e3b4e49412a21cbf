"""Freed activations wait on the host device for requests of their size, within bounds."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from autohete import _C, AutoHeteWrapper

MIB = 1 << 20


@pytest.fixture
def machine() -> _C.HostMachine:
    return _C.HostMachine(gpu_mem=256 * MIB, cpu_mem=256 * MIB)


@contextmanager
def charged(machine: _C.HostMachine) -> Iterator[None]:
    machine.charge_activations(True)
    try:
        yield
    finally:
        machine.charge_activations(False)


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_a_freed_block_serves_the_next_request_of_its_size(machine: _C.HostMachine) -> None:
    with charged(machine):
        first = empty(MIB)
        address = first.data_ptr()
        del first
        assert machine.device_used() == 0
        assert machine.waiting_bytes() == MIB
        again, other = empty(MIB), empty(MIB - 1)
        assert again.data_ptr() == address
        assert other.data_ptr() != address
        assert machine.device_used() == 2 * MIB - 1


def test_what_waits_is_not_used_memory(machine: _C.HostMachine) -> None:
    """As much as the device has can be asked for in one size after another."""
    with charged(machine):
        for size in range(250, 256):
            assert empty(size * MIB).numel() == size * MIB
        with pytest.raises(torch.OutOfMemoryError):
            empty(257 * MIB)
    assert machine.device_used() == 0


def test_blocks_are_held_for_an_eighth_more_than_was_ever_lent(machine: _C.HostMachine) -> None:
    rng = random.Random(0)
    held: list[torch.Tensor] = []
    most = 0
    with charged(machine):
        for _ in range(3000):
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held)))
            else:
                held.append(empty(rng.choice([4096, 5000, 65536, 100_000, MIB, 3 * MIB])))
            lent = sum(t.numel() for t in held)
            most = max(most, lent)
            assert machine.device_used() == lent
            assert lent + machine.waiting_bytes() <= 1.125 * most


def test_sizes_of_before_make_room_for_new_ones(machine: _C.HostMachine) -> None:
    with charged(machine):
        old = [empty(MIB) for _ in range(100)]
        del old
        new = [empty(2 * MIB + i) for i in range(45)]
        assert machine.waiting_bytes() <= (112 - 90) * MIB + MIB
        del new
        again = [empty(2 * MIB + i) for i in range(45)]  # these were asked for last: all are there
        assert machine.waiting_bytes() <= 24 * MIB
        del again


def test_small_blocks_do_not_wait(machine: _C.HostMachine) -> None:
    with charged(machine):
        assert empty(4095).numel() == 4095
    assert machine.waiting_bytes() == 0


def test_any_thread_may_free(machine: _C.HostMachine) -> None:
    """Tensors go to four threads that drop them, while new ones of the same sizes are made."""
    with charged(machine):
        for round_ in range(200):
            parts = [[empty(8192 * (1 + i % 3)) for i in range(16)] for _ in range(4)]
            threads = [threading.Thread(target=part.clear) for part in parts]
            for thread in threads:
                thread.start()
            fresh = [empty(8192).fill_(round_ % 251) for _ in range(16)]
            for thread in threads:
                thread.join()
            assert all(bool((t == round_ % 251).all()) for t in fresh)
            del fresh
    assert machine.device_used() == 0
    assert machine.waiting_bytes() <= 2 * 4 * 16 * 3 * 8192


_OUTLIVES = """
import psutil, torch
from autohete import _C

MIB = 1 << 20
process = psutil.Process()

def filled(count, size):
    return [torch.empty(size * MIB, dtype=torch.uint8).fill_(1) for _ in range(count)]

machine = _C.HostMachine(gpu_mem=512 * MIB, cpu_mem=MIB)
machine.charge_activations(True)
kept = filled(4, 64)
filled(4, 40)
machine.charge_activations(False)
assert machine.waiting_bytes() == 160 * MIB
full = process.memory_info().rss
machine.close()
assert machine.waiting_bytes() == 0
assert full - process.memory_info().rss > 100 * MIB
del machine
assert all(int(t.sum()) == 64 * MIB for t in kept)
full = process.memory_info().rss
del kept
assert full - process.memory_info().rss > 200 * MIB
"""


def test_tensors_that_outlive_their_device_leave_nothing_waiting() -> None:
    """In a process of its own: what glibc cuts from a heap that others grew stays in that heap."""
    subprocess.run([sys.executable, "-c", _OUTLIVES], timeout=120, check=True)


def test_unwrapping_gives_everything_back() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = AutoHeteWrapper(model, optimizer, "64MiB", "64MiB", profile_path=None).to("cpu")
    machine = wrapped.run.side.machine
    for _ in range(3):
        wrapped(torch.ones(256, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert machine.waiting_bytes() > 0
    wrapped.unwrap()
    assert machine.waiting_bytes() == 0


def test_devices_that_take_turns_hold_no_more_than_an_eighth_above_their_most() -> None:
    """Models of one process are trained in turn: what waits for one serves the next."""
    machines = [_C.HostMachine(gpu_mem=256 * MIB, cpu_mem=MIB) for _ in range(4)]
    for machine in machines:
        with charged(machine):
            parts = [empty(MIB) for _ in range(32)]
            del parts
    assert sum(machine.waiting_bytes() for machine in machines) <= 36 * MIB


_FORKS = """
import os, signal, sys, threading
import torch
from autohete import _C

machine = _C.HostMachine(gpu_mem=1 << 30, cpu_mem=1 << 30)
over = threading.Event()

def empty():
    return [torch.empty(8192 + 64 * i, dtype=torch.uint8) for i in range(64)]

def allocate():
    machine.charge_activations(True)
    while not over.is_set():
        empty()
    machine.charge_activations(False)

machine.charge_activations(True)
kept = [empty() for _ in range(8)]
machine.charge_activations(False)
threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
ended = []
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        kept.clear()
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
    if ended[-1]:
        break
over.set()
for thread in threads:
    thread.join()
sys.exit(any(ended))
"""


def test_a_forked_child_may_free_while_other_threads_of_the_parent_allocate() -> None:
    """The child's copy of a lock that another thread held at the fork is never let go."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS], timeout=240)
    assert done.returncode == 0, "a forked child hung while it freed tensors"


_CHILD = """
import os, torch
from autohete import _C

MIB = 1 << 20

def empty():
    return torch.empty(MIB, dtype=torch.uint8)

parents = _C.HostMachine(gpu_mem=8 * MIB, cpu_mem=MIB)
parents.charge_activations(True)
inherited = [empty(), empty()]
child = os.fork()
if child == 0:
    empty()  # of the parent's pass: not counted here
    assert parents.waiting_bytes() == 0
    own = _C.HostMachine(gpu_mem=8 * MIB, cpu_mem=MIB)
    own.charge_activations(True)
    kept = [empty(), empty(), empty()]
    inherited.clear()
    assert own.device_used() == 3 * MIB, own.device_used()
    kept.clear()
    assert own.device_used() == 0
    assert own.waiting_bytes() == 3 * MIB
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert parents.device_used() == 2 * MIB
inherited.clear()
assert parents.device_used() == 0
"""


def test_a_forked_child_counts_what_is_its_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _CHILD], timeout=120)
    assert done.returncode == 0
