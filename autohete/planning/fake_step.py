"""One training step on fake tensors, with every operation booked on the unit that runs.

Every shape and every saved tensor is the real one and nothing is allocated. Attention is taken as
fused (no matrix of scores is kept).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from autohete.planning.grouped_mm import grouped_mm_flops, grouped_mm_out
from autohete.units import Unit

_GROUPED_MM = torch.ops.aten._grouped_mm.default


@dataclass
class UnitNote:
    """What is recorded of one unit; pairs are (forward, backward)."""

    flops: list[int] = field(default_factory=lambda: [0, 0])
    traffic: list[int] = field(default_factory=lambda: [0, 0])
    saved: dict[int, int] = field(default_factory=dict)
    inputs: int = 0
    temporary: int = 0
    half_copies: int = 0
    """Bytes of parameters cast by autocast, which keeps them until their backward."""


class StepRecorder(TorchDispatchMode):
    """Runs the step and books every operation on the unit that runs."""

    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.notes = [UnitNote() for _ in units]
        self.outside = UnitNote()
        self._of_module = {id(m): i for i, unit in enumerate(units) for m in unit.modules}
        self._parameters = {_storage(p) for p in model.parameters()}
        self._parameters |= {_storage(b) for b in model.buffers()}
        self._stack: list[int] = []
        self._current: int | None = None
        self._backward = 0  # 0 in forward, 1 in backward
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._base = 0
        self._kept: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip it torch imports it: a second

    # ---- the step
    def run(self, ids: torch.Tensor, autocast: torch.dtype | None = None) -> None:
        """Forward and backward once; `autocast` is the dtype to compute in, None for none."""
        handles = []
        for module in self._model.modules():
            if id(module) in self._of_module:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            with (
                self,
                _fused_attention(),
                torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor),
            ):
                loss = _loss(self._model, ids)
            with self:
                self._backward, self._current = 1, None
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()

    def outside_bytes(self) -> int:
        """Inputs, logits, loss and what else no unit saves."""
        return sum(self.outside.saved.values()) + self.outside.temporary

    def _note(self) -> UnitNote:
        return self.outside if self._current is None else self.notes[self._current]

    # ---- borders of units
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        index = self._of_module[id(module)]
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_left(index))
        self._stack.append(index)
        self._current = index
        note = self.notes[index]
        distinct = {
            _storage(t): t.untyped_storage().nbytes() for t in inputs if t.is_floating_point()
        }
        note.inputs = max(note.inputs, sum(distinct.values()))
        self._base = self._live_bytes

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        index = self._stack.pop()
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_entered(index))
        self._current = self._stack[-1] if self._stack else None
        self._base = self._live_bytes

    def _backward_entered(self, index: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            self._current = index
            self._base = self._live_bytes

        return hook

    def _backward_left(self, index: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            if self._current == index:
                self._current = None
                self._base = self._live_bytes

        return hook

    # ---- tensors
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in self._parameters:
            self._note().saved.setdefault(key, tensor.untyped_storage().nbytes())
            self._kept.append(tensor)  # so that no other storage gets this key
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # most of all calls, and there is nothing to book
            return args[0].fake_device
        out = _run(func, args, kwargs or {})
        note = self._note()
        produced = _tensors(out)
        fresh = [t for t in produced if self._track(t)]
        note.flops[self._backward] += _flops(func, args, kwargs or {}, out)
        if fresh:
            read = sum(tensor_bytes(t) for t in _tensors((args, kwargs)))
            note.traffic[self._backward] += read + sum(tensor_bytes(t) for t in fresh)
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self._parameters:
            note.half_copies += sum(tensor_bytes(t) for t in fresh)
            for copy in fresh:  # kept by autocast's cache even where no operation saves it
                self._pack(copy)
        extra = self._live_bytes - self._base
        saved = 0 if self._backward else sum(note.saved.values())
        note.temporary = max(note.temporary, extra - saved)
        return out

    def _track(self, tensor: torch.Tensor) -> bool:
        """Count a storage seen for the first time until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._parameters:
            return False
        size = storage.nbytes()
        self._live[key] = size
        self._live_bytes += size
        weakref.finalize(storage, self._died, key)
        return True

    def _died(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key, 0)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _GROUPED_MM and args[0].dtype is not torch.bfloat16:
        return grouped_mm_out(*args, **kwargs)
    return func(*args, **kwargs)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if func is _GROUPED_MM:
        return grouped_mm_flops(*args)
    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # not in torch's registry
        shapes = (tensor.shape for tensor in args[:3])
        return int(sdpa_flop_count(*shapes))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        shapes = (tensor.shape for tensor in args[:4])
        return int(sdpa_backward_flop_count(*shapes))
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> list[torch.Tensor]:
    if hasattr(tree, "to_tuple"):
        tree = tree.to_tuple()
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    if "labels" in inspect.signature(model.forward).parameters:
        out = model(input_ids=ids, labels=ids)
        return out["loss"] if isinstance(out, dict) else getattr(out, "loss", _tensors(out)[0])
    return _tensors(model(ids))[0].float().sum()


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Attention dropout off, so that the fused kernel is chosen as it is on a GPU."""
    original = nn.functional.scaled_dot_product_attention

    def fused(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dropout_p"] = 0.0
        return original(*args[:4], **kwargs)

    nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original
