"""The keywords of AutoHeteWrapper, checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autohete.distributed import rank_of_launch, ranks_here
from autohete.planning import STRATEGIES, Plan, format_bytes, parse_bytes
from autohete.units import Layers

Size = int | float | str | None
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Config:
    """How to train. Raises ValueError for a value that cannot be honoured."""

    gpu_mem: Size = None
    """Device memory to stay within, bytes or "24GiB"; left out: what is free on the GPU."""
    cpu_mem: Size = None
    """Host memory likewise; left out: what is free now, less some headroom."""
    strategy: str = "autohete"
    plan: Plan | str | Path | None = None
    """A plan, or an autohete_profile.json that holds one; left out: made after the first step."""
    profile_path: str | Path | None = "autohete_profile.json"
    """Where the measured profile and the plan are written; None writes nothing. A file that cannot
    be written then is a warning: training does not need it."""
    precision: str | None = None
    """"fp32", "bf16" or "fp16" (half parameters, fp32 masters); left out: what the model is."""
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    """Clip the total norm in step(), as `torch.nn.utils.clip_grad_norm_` would before it."""
    early_updates: bool | str = True
    """Update units while backward goes on, beside their present state (a second copy of it on the
    host, where cpu_mem has room), once the loop's habit is known; False waits for step().
    "in_place" needs no second copy: it is your promise that step() follows directly, after every
    `gradient_accumulation_steps` backward passes, with nothing changed in between (no clipping, no
    scaler, no step left out). A promise that is not kept raises RuntimeError, and the values of
    that step are lost."""
    num_workers: int | None = None
    layers: Layers = None
    """What counts as a unit; see autohete.units.find_units."""
    window: int = 2
    """Device slots for parameters that live on the host."""
    chunk_bytes: int = 4 << 20
    pin: bool = True
    process_group: Any = None
    """Ranks that train together, each with its share of the batch: a group of torch.distributed;
    left out: all ranks, where it is initialised or torchrun started them; False: this one alone."""
    whole_gradients: bool = True
    """False: of several ranks each averages the gradients of the rows that it updates only: half of
    the exchange, and only those go to the host. It is your promise that nothing reads `p.grad`,
    whose other rows are NaN, before step(): clip with max_grad_norm, use no GradScaler."""
    rank_bandwidth: Size = None
    """Bytes per second that a rank sends and receives, for the plan; left out: timed once."""

    def __post_init__(self) -> None:
        if self.gpu_mem is not None:
            self.gpu_mem = parse_bytes(self.gpu_mem, "gpu_mem")
        if self.cpu_mem is not None:
            self.cpu_mem = parse_bytes(self.cpu_mem, "cpu_mem")
        if self.rank_bandwidth is not None:
            self.rank_bandwidth = parse_bytes(self.rank_bandwidth, "rank_bandwidth")
            if self.rank_bandwidth == 0:
                raise ValueError("rank_bandwidth is 0, expected bytes per second above 0")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy is {self.strategy!r}, expected one of {', '.join(STRATEGIES)}"
            )
        if self.precision is not None and self.precision not in tuple(PRECISIONS):
            raise ValueError(
                f"precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}"
            )
        if not isinstance(self.plan, (Plan, str, Path, type(None))):
            raise ValueError(
                f"plan is {self.plan!r}, expected a Plan or the path of a profile file"
            )
        self._check_profile_path()
        if self.early_updates not in (True, False, "in_place"):
            raise ValueError(
                f'early_updates is {self.early_updates!r}, expected True, False or "in_place"'
            )
        if self.early_updates == "in_place" and self.max_grad_norm is not None:
            raise ValueError(
                f'early_updates is "in_place" with max_grad_norm={self.max_grad_norm}, expected no '
                "clipping: the norm is known only when every gradient is there; use "
                "early_updates=True"
            )
        for name, low in (("gradient_accumulation_steps", 1), ("window", 1), ("chunk_bytes", 4096)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}, expected a whole number of at least {low}")
        if not isinstance(self.pin, bool):
            raise ValueError(f"pin is {self.pin!r}, expected True or False")
        workers, norm = self.num_workers, self.max_grad_norm
        if workers is not None and not (isinstance(workers, int) and 1 <= workers <= 4096):
            raise ValueError(f"num_workers is {workers!r}, expected a whole number from 1 to 4096")
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise ValueError(f"max_grad_norm is {norm!r}, expected a number above 0, or None")

    def _check_profile_path(self) -> None:
        path = self.profile_path
        if not isinstance(path, (str, Path, type(None))):
            raise ValueError(f"profile_path is {path!r}, expected a path, or None to write nothing")
        if path is None or rank_of_launch() != 0:  # only the first rank writes it
            return
        if not Path(path).parent.is_dir() or Path(path).is_dir():
            raise ValueError(
                f"profile_path is {str(path)!r}, expected a file in a folder that is there; make "
                "the folder, name a file, or give None to write nothing"
            )

    def updates_early(self) -> bool:
        """Whether updates may run ahead of step(): wanted, and part of the strategy."""
        return bool(self.early_updates) and self.strategy in ("autohete", "stronghold")

    def budget_for(self, device: torch.device) -> int:
        """Return gpu_mem, measured when it was left out.

        Raises:
            ValueError: it was left out on the host device, which has no size of its own.
        """
        if self.gpu_mem is not None:
            return int(self.gpu_mem)
        if device.type == "cpu":
            raise ValueError(
                "gpu_mem is None, expected a size on the host device (it stands for a GPU of your "
                'choice); give for example gpu_mem="4GiB"'
            )
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.95) + torch.cuda.memory_reserved(device)

    def host_budget(self) -> int:
        """Return cpu_mem, measured when it was left out."""
        if self.cpu_mem is not None:
            return int(self.cpu_mem)
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(pages * 0.9) // ranks_here()


def describe(config: Config, gpu_mem: int, cpu_mem: int) -> str:
    """Return the budgets in words, for the log."""
    return f"gpu_mem={format_bytes(gpu_mem)}, cpu_mem={format_bytes(cpu_mem)}"
