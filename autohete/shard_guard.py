"""Shards whose values are being updated wear a guard: the first touch waits until they are final.

The guard of `autohete/guard.py` for DTensors. DTensor hands what a rank has to operators in C++ and
to Python code as an attribute; both ask the guard first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autohete.guard import Guard

_slot: Any = DTensor._local_tensor


class ShardGuard(Guard, DTensor):
    """What the guard classes of all units' DTensors share."""

    @property
    def _local_tensor(self) -> Tensor:
        type(self).settle()
        local: Tensor = _slot.__get__(self)
        return local

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        type(self).settle()
        _slot.__set__(self, local)


class ShardGuards:
    """The guard classes of one unit, and the tensors that wear them.

    Args:
        settle: makes them final; called on the first touch of one.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        body = {"settle": staticmethod(settle)}
        self._guards: dict[Any, Any] = {
            DTensor: type("DTensor", (ShardGuard,), dict(body)),
            torch.Tensor: type("Tensor", (Guard, torch.Tensor), dict(body)),
            nn.Parameter: type("Parameter", (Guard, nn.Parameter), dict(body)),
        }
        self._worn: list[tuple[Tensor, Any]] = []

    def wear(self, tensors: Iterable[Tensor]) -> None:
        """Guard tensors; those of other classes than torch's own stay as they are."""
        for tensor in tensors:
            own: Any = type(tensor)
            if own in self._guards:
                tensor.__class__ = self._guards[own]
                self._worn.append((tensor, own))

    def take_off(self) -> None:
        """Make them instances of their own classes again."""
        worn, self._worn = self._worn, []
        for tensor, own in worn:
            tensor.__class__ = own
