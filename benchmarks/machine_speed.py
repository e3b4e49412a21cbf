"""How fast the machine is just now, and who else is on it.

A virtual machine computes 10 to 30 % faster or slower from one minute to the next, though nothing
else runs that its operating system could see. A speed is what one plain PyTorch step of the model
under test takes, nothing of autohete in it; what was timed at one speed is predicted for another
by the ratio of the two.
"""

from __future__ import annotations

import ctypes
import sys
import time
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from autohete.planning import Profile

_STEPS = 5  # of a reading
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt()


def keep_heap() -> None:
    """Let glibc keep what is freed, so that plain PyTorch is at its best beside others.

    By itself it gives the top of its heap back between steps or not, by luck of what lies there:
    300 to 2500 page faults a step of a small GPT, up to 4 percent of it. autohete's host device
    does not depend on it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes


class Speed:
    """Seconds of a plain step, when rates were calibrated and now."""

    def __init__(self, model: nn.Module, data: torch.Tensor) -> None:
        self._model, self._data = model, data
        self._calibrated: list[float] = []

    def calibrate(self) -> None:
        """Read once more while the rates are timed; the median of all counts."""
        self._calibrated.append(self._read())

    def now(self) -> float:
        """Return what a step takes now, as a multiple of what it took at calibration."""
        return self._read() / median(self._calibrated)

    def _read(self) -> float:
        self._step()  # whoever ran before has the caches
        return median(self._step() for _ in range(_STEPS))

    def _step(self) -> float:
        start = time.perf_counter()
        self._model(self._data[:, :-1], self._data[:, 1:]).backward()
        seconds = time.perf_counter() - start
        self._model.zero_grad()
        return seconds


def slowed(profile: Profile, times: float) -> Profile:
    """Return the profile of a device that takes so many times as long; links and CPU lane stay."""
    slow = Profile(profile)
    units = list(slow.units)
    for unit in units:
        unit.forward_seconds *= times
        unit.backward_seconds *= times
        unit.recompute_seconds *= times
    slow.units = units
    slow.outside_seconds *= times
    slow.loop_seconds *= times
    hardware = slow.hardware
    hardware.device_params_per_second /= times
    slow.hardware = hardware
    return slow


class Busy:
    """How many cores others kept busy since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        all_cpus: Any = psutil.cpu_times()
        busy = sum(all_cpus) - all_cpus.idle - getattr(all_cpus, "iowait", 0.0)
        busy -= getattr(all_cpus, "guest", 0.0) + getattr(all_cpus, "guest_nice", 0.0)
        own = psutil.Process().cpu_times()
        return time.perf_counter(), busy - own.user - own.system

    def others(self) -> float:
        (begin, before), (end, after) = self._start, self._now()
        return max(after - before, 0.0) / (end - begin)
