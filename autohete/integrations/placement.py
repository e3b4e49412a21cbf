"""A model whose parameters stay where they are until somebody who knows better places them.

Trainers move the whole model to the device before they ask anybody (`model.to(device)`), which is
what a model bigger than the device cannot survive. A Hold answers on the model's behalf: buffers
move, parameters do not.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from autohete.hooks import HookedForward, in_backward

Fn = Callable[[torch.Tensor], torch.Tensor]


class Holder(Protocol):
    """Who holds a model."""

    def check_move(self, device: torch.device) -> None:
        """Raise where the model's buffers must not go to `device`."""

    def before_evaluation(self) -> None:
        """A forward without gradients begins; not called after let_forward_pass()."""

    def unwrap(self) -> nn.Module:
        """Let go of the model."""


class HeldApply:
    """Stands in for `_apply` of one module, which `.to()`, `.cuda()` and `.half()` end in.

    Copies and pickles of the module get its class's own `_apply`.
    """

    def __init__(self, module: nn.Module, owner: Holder) -> None:
        self.module = module
        self.owner = owner

    def __call__(self, fn: Fn, recurse: bool = True) -> nn.Module:
        self.owner.check_move(self._effect(fn))
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self.module

    def _effect(self, fn: Fn) -> torch.device:
        """Return the device `fn` moves to; refuse whatever else it does."""
        device = torch.device("cpu")
        for dtype in {p.dtype for p in self.module.parameters()}:
            probe = fn(torch.zeros(1, dtype=dtype))
            device = probe.device
            if probe.dtype != dtype:
                raise ValueError(
                    f"model: a conversion of {dtype} to {probe.dtype} was asked for, expected none "
                    "while an AutoHeteCallback holds the model; convert it before the callback is "
                    "built, or use precision="
                )
            if device.type == "cpu" and probe.is_shared():
                raise ValueError(
                    "model: share_memory() was called, expected no sharing between processes while "
                    "an AutoHeteCallback holds the model; call unwrap() on the callback first"
                )
        return device

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module), self.module)
        return types.MethodType(type(self.module)._apply, copied)

    def __reduce__(self) -> Any:
        # Unpickled before the module's attributes are set, so this finds the class's own.
        return getattr, (self.module, "_apply")


class HeldForward(HookedForward):
    """Calls `before_evaluation` before a forward that no backward can follow."""

    def __init__(self, module: nn.Module, before_evaluation: Callable[[], None]) -> None:
        super().__init__(None, module)  # type: ignore[arg-type]
        self.before_evaluation: Callable[[], None] | None = before_evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.before_evaluation
        if before is not None and not torch.is_grad_enabled() and not in_backward():
            before()
        return self.forward(*args, **kwargs)

    def remove(self) -> None:
        self.before_evaluation = None  # whoever wrapped this object calls the plain forward
        super().remove()


class Hold:
    """Keeps a model's parameters in place from construction to release().

    The model then keeps its holder alive, since nobody else could let go of it.
    """

    def __init__(self, model: nn.Module, owner: Holder) -> None:
        self.model = model
        self._apply = HeldApply(model, owner)
        vars(model)["_apply"] = self._apply
        self._forward = HeldForward(model, owner.before_evaluation)
        self._forward.install()

    def let_forward_pass(self) -> None:
        """Leave the model's forward alone from now on."""
        self._forward.remove()

    def release(self) -> None:
        """Let the model be moved again."""
        self.let_forward_pass()
        if vars(self.model).get("_apply") is self._apply:
            del vars(self.model)["_apply"]


def holder_of(model: nn.Module) -> Holder | None:
    """Return who holds the model."""
    held = vars(model).get("_apply")
    return held.owner if isinstance(held, HeldApply) else None
