"""What is known here of FSDP2's inside, in one place: its units and the memory they gather from.

torch says no more in public than which modules are sharded. Looked at: torch 2.13's FSDPState,
FSDPParamGroup and FSDPParam. Where another version differs, units_of() refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["ShardedUnit", "units_of"]


class ShardedUnit:
    """What fully_shard() gathers and frees at once: one or more modules."""

    def __init__(self, name: str, state: Any) -> None:
        self.name = name
        self.modules: list[nn.Module] = []
        self._state = state

    def _inside(self) -> list[Any]:
        return [one for group in self._state._fsdp_param_groups for one in group.fsdp_params]

    def parameters(self) -> list[DTensor]:
        """Return the shards, also while the modules show whole parameters."""
        return [one.sharded_param for one in self._inside()]

    def gathered_from(self) -> list[Tensor]:
        """Return what FSDP2 reads when it gathers: the memory of the shards, by other tensors."""
        return [one._sharded_param_data for one in self._inside()]

    def gathered_bytes(self) -> int:
        """Return what the parameters take while they are whole."""
        return sum(shard.nbytes for shard in self.parameters())


def units_of(model: nn.Module) -> list[ShardedUnit]:
    """Return the units of a sharded model, in the order of its modules.

    Raises:
        ValueError: it has none, its shards are not on the CPU, or they are of a class of their own.
        RuntimeError: this torch keeps its shards otherwise.
    """
    units: dict[int, ShardedUnit] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) not in units:
            units[id(state)] = ShardedUnit(name or "the model", state)
        units[id(state)].modules.append(module)  # type: ignore[arg-type]
    if not units:
        raise ValueError(
            f"ShardedUpdates: model is a {type(model).__name__} without sharded modules, expected "
            "one that fully_shard() has been called on; AutoHeteWrapper is for the others"
        )
    for unit in units.values():
        _check(unit)
    return list(units.values())


def _check(unit: ShardedUnit) -> None:
    try:
        pairs = list(zip(unit.parameters(), unit.gathered_from(), strict=True))
        known = all(_share_memory(shard, memory) for shard, memory in pairs)
    except AttributeError:
        known = False
    if not known:
        raise RuntimeError(
            f"ShardedUpdates: torch {torch.__version__} keeps the shards of fully_shard() in ways "
            "not known here, expected those of torch 2.13; use the optimizer without it"
        )
    for shard, memory in pairs:
        local = shard.to_local()
        if local.device.type != "cpu":
            raise ValueError(
                f"ShardedUpdates: the shards of {unit.name} are on {local.device}, expected the "
                "CPU; give fully_shard an offload_policy=CPUOffloadPolicy()"
            )
        if type(memory) is not Tensor:
            raise ValueError(
                f"ShardedUpdates: the shards of {unit.name} are {type(memory).__name__}, expected "
                "plain tensors; use the optimizer without it"
            )


def _share_memory(shard: Any, memory: Any) -> bool:
    # Where a dimension is shorter than the group, the last ranks have nothing.
    local = shard._local_tensor
    storages = [tensor.untyped_storage().data_ptr() for tensor in (local, memory)]
    return bool(local.numel() == 0 or storages[0] == storages[1])
