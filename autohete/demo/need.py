"""What plain training keeps on the device: the figure that `gpu_mem` is held against."""

from __future__ import annotations

from dataclasses import dataclass

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
