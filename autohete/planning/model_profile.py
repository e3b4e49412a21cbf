"""A model's profile without a device: units, bytes and FLOPs from one fake step.

The model runs once, forward and backward, on fake tensors: every shape and every saved tensor is
the real one and nothing is allocated. Attention is taken as fused (no matrix of scores is kept).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from autohete.units import Layers, Unit, find_units

# Bytes per parameter: compute dtype, moments (and masters), copy kept when only the state leaves.
# Moments and masters are fp32 (Adam: 8 bytes, with a master 12).
_PRECISIONS = {
    "fp32": (torch.float32, 8, 4),
    "bf16": (torch.bfloat16, 12, 0),
    "fp16": (torch.float16, 12, 0),
}


@dataclass
class UnitDescription:
    """One unit, in bytes and FLOPs; fields as in UnitProfile."""

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    param_bytes: int
    grad_bytes: int
    state_bytes: int
    master_bytes: int
    is_layer: bool
    is_container: bool
    activation_bytes: int = 0
    checkpoint_bytes: int = 0
    temporary_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    forward_traffic_bytes: int = 0
    backward_traffic_bytes: int = 0


@dataclass
class ModelDescription:
    """What one step of a model needs, whatever runs it."""

    units: list[UnitDescription]
    batch: int
    seq: int
    precision: str
    fixed_device_bytes: int
    outside_flops: int = 0
    outside_traffic_bytes: int = 0

    def with_layers(self, count: int) -> ModelDescription:
        """The same model with `count` layers, for a model whose layers are all of one kind."""
        first = next(i for i, unit in enumerate(self.units) if unit.is_layer)
        layers = [unit for unit in self.units if unit.is_layer]
        if {unit.kind for unit in layers} != {layers[0].kind} or count < 1:
            raise ValueError(
                f"with_layers: count is {count}, layers of "
                f"{len({unit.kind for unit in layers})} kinds, expected one kind"
            )
        stem = layers[0].name.rsplit(".", 1)[0]
        repeated = [replace(layers[-1], name=f"{stem}.{i}") for i in range(count)]
        rest = [unit for unit in self.units if not unit.is_layer]
        return replace(self, units=rest[:first] + repeated + rest[first:])

    @property
    def num_parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(unit.num_parameters for unit in self.units)

    @property
    def tokens(self) -> int:
        """Tokens of one forward."""
        return self.batch * self.seq

    @property
    def model_flops(self) -> int:
        """Forward and backward without recomputation."""
        inside = sum(unit.forward_flops + unit.backward_flops for unit in self.units)
        return inside + self.outside_flops


def describe_model(
    model: Any, batch: int, seq: int, precision: str = "bf16", *, layers: Layers = None
) -> ModelDescription:
    """Return units, bytes and FLOPs of one training step of a causal language model.

    Args:
        model: a Hugging Face configuration, or a module called as model(input_ids=, labels=) or as
            model(input_ids) (its output is then summed). A module's own tensors are not touched.
        precision: "fp32", or "bf16" / "fp16" with fp32 masters.
        layers: as for find_units().

    Raises:
        ValueError: an argument out of range, or the model cannot run on fake tensors.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}, expected one of {', '.join(_PRECISIONS)}")
    for name, value in (("batch", batch), ("seq", seq)):
        if type(value) is not int or not 1 <= value <= 2**24:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least 1")
    dtype = _PRECISIONS[precision][0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = _fake_model(model, dtype)
        units = find_units(fake, layers)
        ids = torch.zeros(batch, seq, dtype=torch.long)
        recorder = _Recorder(fake, units)
        try:
            recorder.run(ids)
        except Exception as error:
            raise ValueError(
                f"describe_model: {type(model).__name__} does not run on fake tensors with "
                f"batch {batch} and seq {seq} ({type(error).__name__}: {error}); profile it on a "
                "device instead"
            ) from error
        return ModelDescription(
            units=[
                _described(unit, note, precision)
                for unit, note in zip(units, recorder.notes, strict=True)
            ],
            batch=batch,
            seq=seq,
            precision=precision,
            fixed_device_bytes=recorder.outside_bytes(),
            outside_flops=recorder.outside.flops[0] + recorder.outside.flops[1],
            outside_traffic_bytes=recorder.outside.traffic[0] + recorder.outside.traffic[1],
        )


def _fake_model(model: Any, dtype: torch.dtype) -> nn.Module:
    """The model with fake parameters; call it inside a FakeTensorMode."""
    if isinstance(model, nn.Module):
        return _fake_copy(model, dtype).train()
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise RuntimeError(
            "planning from a configuration needs transformers; pip install transformers"
        ) from error
    built: Any = AutoModelForCausalLM.from_config(model)
    built.config.use_cache = False
    return _fake_copy(built, dtype).train()


def _fake_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a live module with fake tensors in place of its own; none is read."""
    import copy

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=wanted)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


@dataclass
class _Note:
    """What is recorded of one unit; pairs are (forward, backward)."""

    flops: list[int] = field(default_factory=lambda: [0, 0])
    traffic: list[int] = field(default_factory=lambda: [0, 0])
    saved: dict[int, int] = field(default_factory=dict)
    inputs: int = 0
    temporary: int = 0


class _Recorder(TorchDispatchMode):
    """Runs the step and books every operation on the unit that runs."""

    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        super().__init__()
        self._model = model
        self.notes = [_Note() for _ in units]
        self.outside = _Note()
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

    # ---- the step
    def run(self, ids: torch.Tensor) -> None:
        handles = []
        for module in self._model.modules():
            if id(module) in self._of_module:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            with (
                self,
                _fused_attention(),
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

    def _note(self) -> _Note:
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
        out = func(*args, **(kwargs or {}))
        note = self._note()
        produced = _tensors(out)
        fresh = [t for t in produced if self._track(t)]
        note.flops[self._backward] += _flops(func, args, kwargs or {}, out)
        if fresh:
            read = sum(_bytes(t) for t in _tensors((args, kwargs)))
            note.traffic[self._backward] += read + sum(_bytes(t) for t in fresh)
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


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # not in torch's registry
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> list[torch.Tensor]:
    if hasattr(tree, "to_tuple"):
        tree = tree.to_tuple()
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    import inspect

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


def _described(unit: Unit, note: _Note, precision: str) -> UnitDescription:
    _, state, master = _PRECISIONS[precision]
    trainable = [p for p in unit.parameters if p.requires_grad]
    num_trainable = sum(p.numel() for p in trainable)
    saved = sum(note.saved.values())
    return UnitDescription(
        name=unit.name,
        kind=unit.kind,
        is_layer=unit.is_layer,
        is_container=unit.is_container,
        num_parameters=sum(p.numel() for p in unit.parameters),
        num_trainable=num_trainable,
        param_bytes=sum(_bytes(p) for p in unit.parameters),
        grad_bytes=sum(_bytes(p) for p in trainable),
        state_bytes=state * num_trainable,
        master_bytes=master * num_trainable,
        activation_bytes=saved,
        checkpoint_bytes=min(note.inputs, saved),
        temporary_bytes=note.temporary,
        forward_flops=note.flops[0],
        backward_flops=note.flops[1],
        forward_traffic_bytes=note.traffic[0],
        backward_traffic_bytes=note.traffic[1],
    )
