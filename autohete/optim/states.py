"""State tensors: laid out like their parameter, and loaded as they were saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autohete import _C

__all__ = [
    "FP32_KEYS",
    "StatePools",
    "check_kind",
    "check_shapes",
    "like",
    "loaded_state",
    "new_state",
]

FP32_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


_LARGE_PAGE = 2 << 20


class StatePools:
    """Memory for the small states of an optimizer's parameters, one pool for each kind of state.

    What is walked one after the other lies so, on large pages. Where all of a kind would not fill
    one, they keep torch's memory.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self._numels = [p.numel() for p in params if p.requires_grad]
        self._room: dict[int, int] = {}  # by bytes of an item: what all small ones take
        self._pools: dict[str, _C.TensorPool] = {}

    def give(self, key: str, tensor: Tensor) -> None:
        """Give a new state of that kind memory, if there is any for it."""
        item = tensor.element_size()
        if item not in self._room:
            sizes = [item * numel for numel in self._numels]
            self._room[item] = sum(-(-size // 64) * 64 for size in sizes if size < _LARGE_PAGE)
        if self._room[item] < _LARGE_PAGE:
            return
        if key not in self._pools or not self._pools[key].give(tensor):
            number = list(self._pools).index(key) if key in self._pools else len(self._pools)
            self._pools[key] = _C.TensorPool(self._room[item], number)
            self._pools[key].give(tensor)


def new_state(
    key: str,
    param: Tensor,
    state: dict[str, Any],
    dtype: torch.dtype,
    grad: Tensor | None = None,
    pools: StatePools | None = None,
) -> Tensor:
    """Return a tensor laid out as its parameter, with undefined values, to be state[key].

    A large one begins at another place of a large page than the parameter, the rest of the state
    and the gradient, which an update walks beside it. A small one comes from `pools`.
    """
    made = torch.empty_like(param, dtype=dtype, device="cpu", memory_format=torch.preserve_format)
    if made.nbytes < _LARGE_PAGE:
        if pools is not None:
            pools.give(key, made)
        return made
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


def check_kind(where: str, saved: dict[str, Any], needed: tuple[str, ...]) -> None:
    """Raise ValueError where one parameter's state of a state dict is another rule's."""
    kept = [key for key, value in saved.items() if isinstance(value, Tensor)]
    kept = [key for key in kept if key not in ("step", "master")]
    missing = [key for key in needed if key not in saved]
    if kept and missing:
        raise ValueError(
            f"{where}: a parameter's state in the state dict has {', '.join(kept)} and no "
            f"{' and no '.join(missing)}, expected {' and '.join(needed)}; load the state dict of "
            "the same kind of optimizer, or of the model alone"
        )


def loaded_state(
    param: Tensor,
    saved: dict[str, Any],
    moment_dtype: torch.dtype = torch.float32,
    pools: StatePools | None = None,
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
            made = new_state(key, param, state, dtype, pools=pools)
            state[key] = made.copy_(value.detach())
        else:
            state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def _loaded_step(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    # A float32 counts to 2^24.
    dtype = torch.float32 if value < 2**24 else torch.float64
    return torch.tensor(float(value), dtype=dtype, device="cpu")
