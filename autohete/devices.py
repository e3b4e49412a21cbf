"""The two sides a model can train on, with one face: the host device, and a CUDA GPU."""

from __future__ import annotations

import logging
import time

import torch

from autohete import _C
from autohete.cuda_update import update_group
from autohete.planning import InfeasibleError, format_bytes

_log = logging.getLogger("autohete")


def _warn_once(text: str) -> None:
    _log.warning("%s", text)


class HostSide:
    """The host device: budgets, links that can be throttled, and this process's own memory.

    `machine` has the test controls (hold, delays, failures, poison); see csrc/device/host_link.h.
    """

    def __init__(self, gpu_mem: int, cpu_mem: int, *, pin: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self._gpu_mem = gpu_mem
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

    def num_refusals(self) -> int:
        """Return how often device memory was asked for and not there."""
        return int(self.machine.num_device_refusals())

    def host_peak(self) -> int:
        return int(self.machine.host_peak())

    def plannable(self) -> int:
        """Return the bytes that a plan may count on."""
        return self._gpu_mem

    def others(self) -> int:
        """Return bytes in use that are neither the engine's nor activations: none are counted."""
        return 0

    def rates(self) -> dict[str, float]:
        """Return what is known of the device beyond what the timeline of a step shows."""
        return {}

    def check_host_memory(self) -> None:
        """Nothing to do: the host device reads all of the host's memory."""

    def check_room_for_plain_tensors(self, num_bytes: int) -> None:
        """Nothing to do: what leaves goes to ordinary memory."""

    def close(self) -> None:
        """Nobody trains here any more."""
        self.machine.close()

    def clock(self) -> float:
        """Seconds, once everything queued on the device so far is done."""
        return time.perf_counter()


class CudaSide:
    """A CUDA GPU; slots come from torch's allocator, so its statistics count them.

    `gpu_mem` bounds all that this process holds on the GPU through torch, by torch's own limit;
    what was there before (another model, say) counts too.
    """

    def __init__(
        self, device: torch.device, gpu_mem: int, cpu_mem: int, *, pin: bool = True
    ) -> None:
        if torch.version.cuda is None:
            raise RuntimeError(
                "autohete: this torch is a CPU build, expected a CUDA build; install one "
                'and then autohete again, or train on the host device with .to("cpu")'
            )
        if not hasattr(_C, "CudaMachine"):
            raise RuntimeError(
                "autohete: this build has no CUDA side (it was built with a CPU torch, or without "
                "a CUDA toolkit); reinstall it in this environment: "
                "pip install --no-build-isolation --force-reinstall --no-deps autohete"
            )
        if not torch.cuda.is_available():
            raise RuntimeError(
                "autohete: torch sees no GPU (torch.cuda.is_available() is False), expected one "
                'for .cuda(); use .to("cpu"), the host device, without one'
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)

        def room() -> tuple[int, int]:  # knows nothing of self: the machine would keep it alive
            return max(gpu_mem - torch.cuda.memory_allocated(index), 0), gpu_mem

        self._gpu_mem = gpu_mem
        self.machine = _C.CudaMachine(index, cpu_mem, pin, _warn_once, room)
        self.handle = self.machine.handle()
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._fraction_before: float = get_fraction(index) if get_fraction else 1.0
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(gpu_mem / total, self._fraction_before), index
        )
        try:
            self._warm_up()
        except RuntimeError as error:
            self.close()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise InfeasibleError(
                f"gpu_mem is {format_bytes(gpu_mem)}, expected enough for what CUDA's libraries "
                f"take before the model has anything (8 to 80 MiB, by GPU); give more ({error})"
            ) from error

    def _warm_up(self) -> None:
        """Let cuBLAS take its workspaces, one per thread that computes, before a step is measured.

        They stay for good; taken inside a layer they would count as that layer's activations.
        """
        x = torch.zeros(8, 8, device=self.torch_device, requires_grad=True)
        with torch.enable_grad():
            y = torch.nn.functional.linear(x, x, x[0])
        y.backward(torch.zeros_like(y))

    def check_host_memory(self) -> None:
        """Raise RuntimeError unless the GPU can read what is kept on the host.

        Evicted parameters and gradients are CUDA tensors over pinned host memory; where that is
        refused, code that touches one would end in an illegal memory access.
        """
        if not self.machine.host_memory_readable():
            reason = "this GPU cannot read the host's memory"
        elif not self.machine.pins_host_memory():
            reason = "host memory was not pinned"
        else:
            return
        raise RuntimeError(
            f"autohete: {reason}, expected pinned memory that the GPU reads; leave pin=True, raise "
            "the limit on locked memory (ulimit -l unlimited), or lower what is kept on the host"
        )

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

    def num_refusals(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("num_ooms", 0))

    def plannable(self) -> int:
        """All but a twentieth: torch's limit is on whole segments, which are never quite full."""
        return self._gpu_mem - self._gpu_mem // 20

    def others(self) -> int:
        return self.used() - int(self.machine.device_block_bytes())

    def rates(self) -> dict[str, float]:
        """Measure the parameters per second of the update that runs on the GPU."""
        count, repeats = min(4 << 20, self._gpu_mem // 256), 5
        value, exp_avg, exp_avg_sq = torch.zeros(3, count, device=self.torch_device)
        parameter = torch.nn.Parameter(value)
        parameter.grad = torch.zeros_like(value)
        state = {
            "step": torch.tensor(0.0, device="cpu"),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }
        rule = _C.AdamHyper(lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
        with torch.no_grad():
            update_group([(parameter, state)], rule)
            start = self.clock()
            for _ in range(repeats):
                update_group([(parameter, state)], rule)
            return {"device": repeats * count / (self.clock() - start)}

    def host_peak(self) -> int:
        return int(self.machine.host_peak())

    def clock(self) -> float:
        torch.cuda.synchronize(self.torch_device)
        return time.perf_counter()

    def free_for_plain_tensors(self) -> int:
        """Return the bytes that torch could still allocate without gpu_mem as a limit."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        allowed = int(total * self._fraction_before) - reserved
        return min(free, allowed) + reserved - self.used()

    def check_room_for_plain_tensors(self, num_bytes: int) -> None:
        """Raise torch.OutOfMemoryError unless that many bytes more fit, gpu_mem not counted."""
        room = self.free_for_plain_tensors()
        if num_bytes > room:
            raise torch.OutOfMemoryError(
                f"unwrap: model and optimizer state need {format_bytes(num_bytes)} more on "
                f"{self.torch_device} as plain tensors, but {format_bytes(room)} are free there; "
                'keep them on the CPU: unwrap("cpu")'
            )

    def close(self) -> None:
        """Give torch's allocator its own limit back."""
        torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.torch_device.index)


Side = HostSide | CudaSide
