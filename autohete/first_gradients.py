"""Gradients of a layer that leave before its backward is over.

A layer's update can begin when its gradients have landed. For the layers whose backward comes last
the next forward waits for that, so there the half of the gradients that comes first does not wait
for the other. Nothing but the time changes: see docs/adr/0008-updates-ahead-of-step.md.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from autohete.units import Unit

_SMALLEST_BYTES = 256 << 10  # of gradients that are worth a copy and a task of their own
_SHARE_OF_UNITS = 3  # one in so many, those that backward reaches last; the others have time


class FirstGradients:
    """Hooks on parameters whose gradient says that the ones before it are there.

    Args:
        send: called with the unit's index, inside its backward.
    """

    def __init__(self, units: list[Unit], send: Callable[[int], None]) -> None:
        self._units = units
        self._send = send
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        """Hook the layers at both ends: the last that backward reaches, and its first."""
        layers = [index for index, unit in enumerate(self._units) if unit.is_layer]
        near = layers[: -(-len(layers) // _SHARE_OF_UNITS)]
        for index in [*near, *layers[-1:]] if len(layers) > 1 else near:
            parameter = after_the_first(self._units[index])
            if parameter is not None:
                self._hook(parameter, index)

    def _hook(self, parameter: nn.Parameter, index: int) -> None:
        send = self._send

        def first_are_there(parameter: torch.Tensor) -> None:
            send(index)

        with torch._C.DisableTorchFunctionSubclass():  # it may wear a guard
            handle = parameter.register_post_accumulate_grad_hook(first_are_there)
        self._handles.append(handle)

    def __del__(self) -> None:
        """The run is garbage, and its parameters may live on."""
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def after_the_first(unit: Unit) -> nn.Parameter | None:
    """Return the parameter behind the one that completes half of the unit's gradients, or None.

    Gradients come in the reverse of the parameters' order, more or less: where they do not, less
    goes first. One of its own hook is still autograd's, so the hook is on the next one.
    """
    trained = [p for p in reversed(unit.parameters) if p.requires_grad]
    whole = sum(p.nbytes for p in trained)
    first = 0
    for parameter, following in pairwise(trained):
        first += parameter.nbytes
        if first >= max(whole / 2, _SMALLEST_BYTES):
            return following if whole - first >= whole / 8 else None
    return None
