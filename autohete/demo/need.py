"""What plain training keeps on the device: the figure that `gpu_mem` is held against."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes that plain PyTorch with AdamW holds on the device, fp32."""

    parameters: int
    gradients: int
    optimizer_state: int
    saved_activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.saved_activations


def device_need(model: nn.Module, tokens: Tensor, targets: Tensor) -> DeviceNeed:
    """Count parameters, and run one forward to count what autograd saves for backward.

    Temporaries inside operations are left out, so plain training needs a little more than this.
    The random state and the model are left as they were.
    """
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in own:
            saved[storage] = tensor  # holds the storage, so no address comes twice
        return tensor

    with (
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        loss = model(tokens, targets)
    activations = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del loss
    return DeviceNeed(parameters, parameters, 2 * parameters, activations)


def device_bytes_that_train(
    model: nn.Module, tokens: Tensor, targets: Tensor, wanted: int, most: int
) -> int:
    """Return `wanted` where a first step fits in it, else the first size that it fits in.

    Two slots and one layer's work are most of what a small model needs, so that a share of it is
    too little. Each size is tried, by training a copy; the random state is left as it was.

    Args:
        most: bytes that are surely enough; nothing more is tried.
    """
    size = wanted
    while size < most and not _trains_within(model, tokens, targets, size):
        size += size // 4
    return size


def _trains_within(model: nn.Module, tokens: Tensor, targets: Tensor, gpu_mem: int) -> bool:
    from autohete import AutoHeteWrapper, InfeasibleError

    tried: Any = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(tried.parameters())
    options: dict[str, Any] = {"profile_path": None, "process_group": False}
    tried = AutoHeteWrapper(tried, optimizer, gpu_mem=gpu_mem, **options)
    try:
        with torch.random.fork_rng(devices=[]):
            tried.to("cpu")(tokens, targets).backward()
            optimizer.step()
    except (InfeasibleError, torch.OutOfMemoryError):
        return False
    finally:
        tried.unwrap()
    return True
