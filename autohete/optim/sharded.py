"""Parameters that are sharded over ranks (DTensors, as fully_shard makes them), updated in parts.

The rules work element by element, so each rank updates what it has, whatever the mesh and however
it is cut. State is shown as DTensors cut like the parameter, which torch.distributed.checkpoint
saves and loads; they hold the very memory that the update works on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Costs no import where there are none."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


class PartOf:
    """What this rank has of a parameter and its gradient.

    Raises:
        ValueError: they are cut in different ways, or one is not reduced yet.
    """

    def __init__(self, parameter: Any, gradient: Any, name: str) -> None:
        if not is_sharded(gradient):
            raise ValueError(
                f"{name}: a parameter of shape {tuple(parameter.shape)} is a DTensor and its "
                "gradient is not, expected both; let fully_shard make the gradients"
            )
        if (gradient.device_mesh, gradient.placements) != (
            parameter.device_mesh,
            parameter.placements,
        ):
            raise ValueError(
                f"{name}: a parameter is placed {parameter.placements} and its gradient "
                f"{gradient.placements}, expected the same; redistribute the gradient"
            )
        if any(placement.is_partial() for placement in parameter.placements):
            raise ValueError(
                f"{name}: a parameter is placed {parameter.placements}, expected shards or "
                "replicas; redistribute it"
            )
        self._whole = parameter
        self.parameter: Tensor = parameter.to_local()
        self.gradient: Tensor = gradient.to_local()
        if self.parameter.device.type != "cpu":
            raise ValueError(
                f"{name}: a sharded parameter is on {self.parameter.device}, expected the CPU; "
                "give fully_shard an offload_policy=CPUOffloadPolicy()"
            )
        self._local: dict[str, Any] = {}

    def state(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Return the local part of a state, to be completed; see show()."""
        self._local = {
            key: value.to_local() if is_sharded(value) else value for key, value in shown.items()
        }
        return self._local

    def show(self, shown: dict[str, Any]) -> None:
        """Bring what became of the local part into the state."""
        for key in shown.keys() - self._local.keys():
            del shown[key]
        for key, value in self._local.items():
            before: Any = shown.get(key)
            if (
                not isinstance(value, Tensor)
                or value.dim() != self.parameter.dim()
                or key == "step"
            ):
                shown[key] = value
            elif not is_sharded(before) or before.to_local() is not value:
                shown[key] = self._as_whole(value)

    def _as_whole(self, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        whole: Any = self._whole
        with torch.no_grad():
            return DTensor.from_local(
                part,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
