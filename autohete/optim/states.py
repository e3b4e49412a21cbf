"""State tensors: laid out like their parameter, and loaded as they were saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autohete import _C

__all__ = ["FP32_KEYS", "check_shapes", "like", "loaded_state", "new_state"]

FP32_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


def new_state(
    param: Tensor, state: dict[str, Any], dtype: torch.dtype, grad: Tensor | None = None
) -> Tensor:
    """Return a tensor laid out as its parameter, with undefined values, to join `state`.

    A large one begins at another place of a large page than the parameter, the rest of the state
    and the gradient, which an update walks beside it.
    """
    made = torch.empty_like(param, dtype=dtype, device="cpu", memory_format=torch.preserve_format)
    others = [param, grad, *state.values()]
    _C.begin_apart(made, [other for other in others if isinstance(other, Tensor)])
    return made


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return `tensor` laid out as a dense `model` is; itself when it already is."""
    dense = torch.empty_like(model, dtype=tensor.dtype, memory_format=torch.preserve_format)
    return tensor if tensor.stride() == dense.stride() else dense.copy_(tensor)


def check_shapes(where: str, param: Tensor, saved: dict[str, Any]) -> None:
    """Raise ValueError where one parameter's state of a state dict is another parameter's."""
    for key in FP32_KEYS:
        value = saved.get(key)
        if not isinstance(value, Tensor) or hasattr(value, "to_local"):
            continue
        if value.shape != param.shape:
            raise ValueError(
                f"{where}: {key} in the state dict has shape {tuple(value.shape)}, expected its "
                f"parameter's {tuple(param.shape)}; load a state dict of the same model, with "
                "parameters in the same order"
            )


def loaded_state(
    param: Tensor, saved: dict[str, Any], moment_dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return a copy of one parameter's state of a state dict, fp32 where it was fp32."""
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            state[key] = _loaded_step(value)
        elif hasattr(value, "to_local"):  # a rank's part of it: stays what it is
            state[key] = value.detach().clone()
        elif key in FP32_KEYS and isinstance(value, Tensor):
            dtype = torch.float32 if key == "master" else moment_dtype
            state[key] = new_state(param, state, dtype).copy_(value.detach())
        else:
            state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def _loaded_step(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    # A float32 counts to 2^24.
    return torch.tensor(float(value), dtype=torch.float32 if value < 2**24 else torch.float64)
