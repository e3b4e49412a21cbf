"""A unit's forward that keeps its inputs instead of its activations, and runs again in backward.

It is torch's non-reentrant checkpoint, plus what that leaves open: what the first run wrote to. The
second run starts from what the first one started from: inputs that the unit edits in place, objects
such as key-value caches, buffers such as running statistics, attributes such as counters and
generators; and it leaves no second mark on them. When somebody else edited an input, it raises
instead of giving other gradients than plain PyTorch; and so it does when the first recomputations
give another output, for what a layer keeps elsewhere is out of reach.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from autohete.attributes import Attributes
from autohete.units import Buffer, Unit, tensors_in

_NUM_COMPARED = 2  # of a unit's first recomputations
_DEPTH = 8  # how far into nested objects; a key-value cache of encoder and decoder is 6 deep


def recompute_later(
    unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward`; backward calls it again for what it needs."""
    nested = inside_outer_checkpoint()
    run = _TwiceRun(unit, forward, compares=unit.num_compared < _NUM_COMPARED and not nested)
    with set_checkpoint_early_stop(False) if run.compares else nullcontext():
        if unit.edits_inputs is False or nested:
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

    def __init__(self, unit: Unit, forward: Callable[..., Any], *, compares: bool) -> None:
        self._unit = unit
        self.compares = compares
        self._output: list[tuple[float, float]] = []
        self._forward = forward
        self._versions: list[int] | None = None
        self._copies: dict[int, Tensor] = {}
        self._objects: dict[int, Any] = {}
        self._buffers: dict[Buffer, Tensor] = {}
        self._random = (random.getstate(), np.random.get_state())
        self._attributes = Attributes(unit.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._versions is None:
            return self._first(args, kwargs)
        args, kwargs = tree_map(self._before, (args, kwargs))
        if not self._copies and _versions(_inputs(args, kwargs)) != self._versions:
            raise RuntimeError(
                f"unit {self._unit.name}: an input was edited in place after (or inside) its "
                "forward, expected the same values for its recomputation in backward; edit a copy, "
                "or give a plan= that keeps this unit's activations"
            )
        with (
            _buffers_from(self._buffers),
            _random_from(self._random),
            self._attributes.put_back(),
        ):
            out = self._forward(*args, **kwargs)
        if self.compares:
            self._compare(_sums(out))
        return out

    def _compare(self, output: list[tuple[float, float]]) -> None:
        self._unit.num_compared += 1
        if not all(map(_is_close, output, self._output)):
            raise RuntimeError(
                f"unit {self._unit.name}: its forward gave another output when it was recomputed "
                "in backward, expected the same; it draws from a generator or counts in a place "
                "that is not an attribute of its modules: keep it in one, or give a plan= that "
                "keeps this unit's activations"
            )

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._unit
        inputs = _inputs(args, kwargs)
        self._objects = {
            id(leaf): _twin(leaf, {}) for leaf in tree_leaves((args, kwargs)) if _has_state(leaf)
        }
        before = _versions(inputs)
        if unit.edits_inputs is not False:
            self._copies = {
                id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in inputs
            }
        written = _all_buffers(unit) if unit.written_buffers is None else unit.written_buffers
        self._buffers = {key: _value(key).clone() for key in written}
        out = self._forward(*args, **kwargs)
        if self.compares:
            self._output = _sums(out)
        if unit.written_buffers is None:
            unit.written_buffers = [
                key for key, old in self._buffers.items() if not torch.equal(old, _value(key))
            ]
            self._buffers = {key: self._buffers[key] for key in unit.written_buffers}
        self._versions = _versions(inputs)
        if self._versions == before:
            self._copies = {}
            unit.edits_inputs = bool(unit.edits_inputs)
        else:
            unit.edits_inputs = True
            self._versions = before  # no copies: the second run tells
        return out

    def _before(self, leaf: Any) -> Any:
        """What the leaf was before the first run; a copy, for the second writes to it too."""
        if id(leaf) in self._objects:
            return _twin(self._objects[id(leaf)], self._copies)
        return _twin(leaf, self._copies) if isinstance(leaf, Tensor) else leaf


def _sums(out: Any) -> list[tuple[float, float]]:
    """For each tensor of floating point its sum, and how far another run's may be from it.

    A GPU's tensors are added up on the CPU: it costs no device memory, and it happens twice a unit.
    """
    with torch.no_grad():
        return [
            (here.sum(dtype=torch.float64).item(), (1e-4 if t.is_cuda else 1e-5) * _size(here))
            for t in tensors_in(out)
            if t.is_floating_point()
            for here in [t.detach().cpu()]
        ]


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().sum(dtype=torch.float64))


def _is_close(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Equal but for the order of sums: some kernels of a GPU change it each time, and on a busy CPU
    torch's own may in the first call of a process (seen with 2.13: 2e-5 in one layer's output).
    """
    return abs(a[0] - b[0]) <= a[1] or repr(a[0]) == repr(b[0])  # two NaNs are the same


@contextmanager
def _random_from(states: Any) -> Iterator[None]:
    """Draw from Python's and NumPy's generators what was drawn then (torch does its own)."""
    now = (random.getstate(), np.random.get_state())
    random.setstate(states[0])
    np.random.set_state(states[1])
    try:
        yield
    finally:
        random.setstate(now[0])
        np.random.set_state(now[1])


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return tensors_in((args, kwargs), _DEPTH)


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in tensors]


def _has_state(value: Any) -> bool:
    """Whether it is an object (a key-value cache, say) that a forward may write to."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (Tensor, nn.Module, type))
        and (not callable(value))
    )


def _twin(value: Any, copies: dict[int, Tensor], depth: int = _DEPTH) -> Any:
    """Copy the containers and objects; a tensor in them is the same, or a clone of its copy."""
    if isinstance(value, Tensor):
        return copies[id(value)].clone() if id(value) in copies else value
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        return type(value)(_twin(item, copies, depth - 1) for item in value)
    if type(value) is dict:
        return {key: _twin(item, copies, depth - 1) for key, item in value.items()}
    if not _has_state(value):
        return value
    twin = copy.copy(value)
    vars(twin).update({key: _twin(item, copies, depth - 1) for key, item in vars(value).items()})
    return twin


def _value(buffer: Buffer) -> Tensor:
    value = buffer[0]._buffers[buffer[1]]
    assert value is not None
    return value


def _all_buffers(unit: Unit) -> list[Buffer]:
    return [
        (module, name)
        for root in unit.modules
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _buffers_from(values: dict[Buffer, Tensor]) -> Iterator[None]:
    """Run with copies of `values` in the place of the buffers, which stay as they are."""
    present = {(module, name): module._buffers[name] for module, name in values}
    try:
        for (module, name), value in values.items():
            module._buffers[name] = value.clone()
        yield
    finally:
        for (module, name), buffer in present.items():
            module._buffers[name] = buffer
