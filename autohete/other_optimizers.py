"""A second optimizer over a wrapped model: it trains, all by itself, and its user should know."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def watch_other_optimizers(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter]
) -> RemovableHandle:
    """Warn once when another optimizer than the wrapped one steps one of the parameters.

    Its updates are right (tensors are waited for), but they are plain PyTorch's, made after
    backward on the thread that calls them, and no plan counts its state.
    """
    wrapped = weakref.ref(optimizer)
    known = {id(parameter) for parameter in parameters}
    told: list[str] = []

    def before(other: Optimizer, args: Any, kwargs: Any) -> None:
        if told or other is wrapped() or not any(
            id(p) in known for group in other.param_groups for p in group["params"]
        ):  # fmt: skip
            return
        told.append(type(other).__name__)
        warnings.warn(
            f"autohete: {type(other).__name__}.step() was called, not of the "
            f"{type(wrapped()).__name__} that was wrapped with this model: it updates by itself, "
            "without plan or overlap; make the optimizer first and give it to AutoHeteWrapper",
            stacklevel=3,
        )

    return register_optimizer_step_pre_hook(before)
