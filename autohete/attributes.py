"""What modules keep beside tensors: flags, counters, lists that grow, generators of their own.

A forward that runs a second time, in backward, starts from what they were before the first run, and
leaves no second mark on them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_Undo = Callable[[], None]
_TORCHS = vars(nn.Module()).keys() - {"training"} | {
    "forward",
    "_apply",
}  # the last two may be ours


class Attributes:
    """Attributes of modules and of everything inside them, as they are now.

    Containers are copied one level deep, generators give their state, anything else is kept as it
    is: an object that a forward changes from inside is not covered.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._values = [
            (owner, {k: (v, _keeper(v)) for k, v in owner.items() if k not in _TORCHS})
            for owner in _attributes_of(modules)
        ]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Bring them back for the time of the context."""
        present = Attributes(self._modules)
        self._restore()
        try:
            yield
        finally:
            present._restore()

    def _restore(self) -> None:
        for owner, values in self._values:
            for name in owner.keys() - values.keys() - _TORCHS:
                del owner[name]
            for name, (value, undo) in values.items():
                owner[name] = value
                if undo is not None:
                    undo()


def _attributes_of(modules: list[nn.Module]) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield vars(module)


def _keeper(value: Any) -> _Undo | None:
    """Return what brings the inside of `value` back to what it is now."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return None
    if kind in (list, deque):
        items = list(value)
        return lambda: _refill(value, items, value.extend)
    if kind is dict:
        entries = dict(value)
        return lambda: _refill(value, entries, value.update)
    if kind is set:
        members = set(value)
        return lambda: _refill(value, members, value.update)
    if kind is torch.Generator:
        drawn = value.get_state()
        return lambda: value.set_state(drawn) and None
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        old = value.get_state()
        return lambda: value.set_state(old)
    return None


def _refill(container: Any, content: Any, put: Callable[[Any], None]) -> None:
    if len(container) != len(content) or any(
        a is not b for a, b in zip(_flat(container), _flat(content), strict=True)
    ):
        container.clear()
        put(content)


def _flat(container: Any) -> Iterator[Any]:
    for item in container.items() if isinstance(container, dict) else container:
        if isinstance(container, dict):
            yield from item
        else:
            yield item
