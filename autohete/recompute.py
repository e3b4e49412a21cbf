"""A unit's forward that keeps its inputs instead of its activations, and runs again in backward.

It is torch's non-reentrant checkpoint, plus what that leaves open: inputs that are written to in
place. A unit that edits its own inputs is run again from copies; when somebody else edited them,
the recomputation raises instead of giving other gradients than plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from autohete.units import Unit, tensors_in


def recompute_later(
    unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward`; backward calls it again for what it needs."""
    run = _TwiceRun(unit, forward)
    if unit.edits_inputs is False or inside_outer_checkpoint():
        # torch keeps the inputs: freed by an outer checkpoint, refused once they were edited.
        return checkpoint(run, *args, use_reentrant=False, **kwargs)
    return checkpoint(lambda: run(*args, **kwargs), use_reentrant=False)


def inside_outer_checkpoint() -> bool:
    """Return whether saved tensors are redirected, as in a recomputation the user asked for.

    There the same tensors have to be saved as in the first run, so a unit nests its own checkpoint.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _TwiceRun:
    """One call of a unit: the first run, and the same run again."""

    def __init__(self, unit: Unit, forward: Callable[..., Any]) -> None:
        self._unit = unit
        self._forward = forward
        self._versions: list[int] | None = None
        self._copies: dict[int, Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._versions is None:
            return self._first(args, kwargs)
        if self._copies:
            args, kwargs = tree_map_only(Tensor, self._before, (args, kwargs))
        elif _versions(tensors_in((args, kwargs))) != self._versions:
            raise RuntimeError(
                f"unit {self._unit.name}: an input was edited in place after (or inside) its "
                "forward, expected the same values for its recomputation in backward; edit a copy, "
                "or give a plan= that keeps this unit's activations"
            )
        return self._forward(*args, **kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        before = _versions(inputs)
        if self._unit.edits_inputs is not False:
            self._copies = {
                id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in inputs
            }
        out = self._forward(*args, **kwargs)
        self._versions = _versions(inputs)
        if self._versions == before:
            self._copies = {}
            self._unit.edits_inputs = bool(self._unit.edits_inputs)
        else:
            self._unit.edits_inputs = True
            self._versions = before  # no copies: the second run tells
        return out

    def _before(self, tensor: Tensor) -> Tensor:
        copy = self._copies.get(id(tensor))
        return tensor if copy is None else copy.clone()  # it will be edited again


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in tensors]
