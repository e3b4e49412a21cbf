"""The two sides a model can train on, with one face: the host device, and a CUDA GPU."""

from __future__ import annotations

import logging
import time

import torch

from autohete import _C

_log = logging.getLogger("autohete")


def _warn_once(text: str) -> None:
    _log.warning("%s", text)


class HostSide:
    """The host device: budgets, links that can be throttled, and this process's own memory.

    `machine` has the test controls (hold, delays, failures, poison); see csrc/device/host_link.h.
    """

    def __init__(self, gpu_mem: int, cpu_mem: int, *, pin: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self.machine = _C.HostMachine(gpu_mem, cpu_mem, pin, _warn_once)
        self.handle = self.machine.handle()

    def charge_activations(self, on: bool) -> None:
        """Count what this thread's torch allocates as device memory, or stop."""
        self.machine.charge_activations(on)

    def set_advice(self, text: str) -> None:
        """What an out-of-memory message says at its end."""
        self.machine.set_advice(text)

    def used(self) -> int:
        return self.machine.device_used()

    def peak(self) -> int:
        return self.machine.device_peak()

    def reset_peak(self) -> None:
        self.machine.reset_device_peak()

    def host_peak(self) -> int:
        return self.machine.host_peak()

    def clock(self) -> float:
        """Seconds, once everything queued on the device so far is done."""
        return time.perf_counter()


class CudaSide:
    """A CUDA GPU; slots come from torch's allocator, so its statistics count them."""

    def __init__(
        self, device: torch.device, gpu_mem: int, cpu_mem: int, *, pin: bool = True
    ) -> None:
        if not hasattr(_C, "CudaMachine"):
            raise RuntimeError(
                "autohete: this build has no CUDA side (it was built with a CPU torch, or without "
                "a CUDA toolkit); reinstall it in this environment: "
                "pip install --no-build-isolation --force-reinstall --no-deps autohete"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.machine = _C.CudaMachine(index, cpu_mem, pin, _warn_once)
        self.handle = self.machine.handle()
        fraction = gpu_mem / torch.cuda.get_device_properties(index).total_memory
        if fraction < 1:
            torch.cuda.set_per_process_memory_fraction(fraction, index)
        self._base = torch.cuda.memory_allocated(index)

    def charge_activations(self, on: bool) -> None:
        """Nothing to do: torch's allocator counts."""

    def set_advice(self, text: str) -> None:
        """Nothing to do: the message is torch's."""

    def used(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def host_peak(self) -> int:
        return self.machine.host_peak()

    def clock(self) -> float:
        torch.cuda.synchronize(self.torch_device)
        return time.perf_counter()


Side = HostSide | CudaSide
