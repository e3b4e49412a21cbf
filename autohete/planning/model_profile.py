"""A model's profile without a device: units, bytes and FLOPs from one fake step.

The model runs once, forward and backward, on fake tensors: every shape and every saved tensor is
the real one and nothing is allocated. Attention is taken as fused (no matrix of scores is kept).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autohete.planning.built_model import BuiltModel, build_model
from autohete.planning.fake_step import StepRecorder, UnitNote, tensor_bytes
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.long_models import LAYERS_RUN, agree, lengthened, shortened
from autohete.units import Layers, Unit, find_units

# Parameters' dtype; bytes per parameter of moments (and masters) and of the copy kept when only
# the state leaves; autocast's dtype. Moments and masters are fp32 (Adam: 8 bytes, with a master
# 12). Under autocast the parameters are their own masters: they, links and gradients are fp32.
_PRECISIONS: dict[str, tuple[torch.dtype, int, int, torch.dtype | None]] = {
    "fp32": (torch.float32, 8, 4, None),
    "bf16": (torch.bfloat16, 12, 0, None),
    "fp16": (torch.float16, 12, 0, None),
    "autocast": (torch.float32, 8, 4, torch.bfloat16),
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
    grad_tensors: int
    largest_grad_tensor_bytes: int
    state_bytes: int
    master_bytes: int
    is_layer: bool
    is_container: bool
    activation_bytes: int = 0
    checkpoint_bytes: int = 0
    temporary_bytes: int = 0
    half_copy_bytes: int = 0
    """Part of activation and checkpoint bytes: parameters cast by autocast."""
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


@dataclass
class _Outside:
    """What no unit saves, computes or moves."""

    device_bytes: int
    flops: int
    traffic_bytes: int


def describe_model(
    model: Any, batch: int, seq: int, precision: str = "bf16", *, layers: Layers = None
) -> ModelDescription:
    """Return units, bytes and FLOPs of one training step of a causal language model.

    Args:
        model: a Hugging Face configuration, what build_model() made of one, or a module called as
            model(input_ids=, labels=) or as model(input_ids) (its output is then summed). A
            module's own tensors are not touched.
        precision: "fp32"; "bf16" / "fp16" with fp32 masters; or "autocast": fp32 parameters,
            computed in bf16, where each layer's half copy is kept until its backward.
        layers: as for find_units().

    Raises:
        ValueError: an argument out of range, or the model cannot run on fake tensors.
    """
    _check(batch, seq, precision)
    if isinstance(model, nn.Module):
        model = BuiltModel(model, type(model).__name__, of_configuration=False)
    elif not isinstance(model, BuiltModel):
        model = build_model(model)
    with model.mode:
        dtype = _PRECISIONS[precision][0]
        whole = model.module
        ids = torch.zeros(batch, seq, dtype=torch.long)
        try:
            short = None
            if model.of_configuration:
                short = _describe_long(model, dtype, ids, precision, layers)
            return short or _describe_step(_fake_copy(whole, dtype).train(), ids, precision, layers)
        except Exception as error:
            raise ValueError(
                f"describe_model: {model.kind} does not run on fake tensors with "
                f"batch {batch} and seq {seq} ({type(error).__name__}: {error}); profile it on a "
                "device instead"
            ) from error


def describe_gpt2(shape: GPT2Shape, batch: int, seq: int, precision: str) -> ModelDescription:
    """Describe a GPT-2 as describe_model() would, in a tenth of the time.

    Raises:
        ValueError: an argument out of range, or the precision "autocast", which the meta device
            has not got.
    """
    _check(batch, seq, precision)
    dtype, *_, autocast = _PRECISIONS[precision]
    if autocast is not None:
        raise ValueError(
            f"describe_gpt2: precision is {precision!r}, expected fp32, bf16 or fp16; use "
            "describe_model()"
        )
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    return _describe_step(shape.build(dtype), ids, precision, None)


def _check(batch: int, seq: int, precision: str) -> None:
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}, expected one of {', '.join(_PRECISIONS)}")
    for name, value in (("batch", batch), ("seq", seq)):
        if type(value) is not int or not 1 <= value <= 2**24:
            raise ValueError(f"{name} is {value!r}, expected a whole number from 1 to {2**24}")


def _describe_step(
    model: nn.Module, ids: torch.Tensor, precision: str, layers: Layers
) -> ModelDescription:
    return _put_together(*_run_step(model, ids, precision, layers), ids, precision)


def _run_step(
    model: nn.Module, ids: torch.Tensor, precision: str, layers: Layers
) -> tuple[list[UnitDescription], _Outside]:
    """Run a model without values on tokens without values, and add up what was seen."""
    units = find_units(model, layers)
    recorder = StepRecorder(model, units)
    recorder.run(ids, _PRECISIONS[precision][3])
    notes = zip(units, recorder.notes, strict=True)
    return [_described(unit, note, precision) for unit, note in notes], _Outside(
        recorder.outside_bytes(), sum(recorder.outside.flops), sum(recorder.outside.traffic)
    )


def _put_together(
    units: list[UnitDescription], outside: _Outside, ids: torch.Tensor, precision: str
) -> ModelDescription:
    batch, seq = ids.shape
    return ModelDescription(
        units=_alike(units),
        batch=batch,
        seq=seq,
        precision=precision,
        fixed_device_bytes=outside.device_bytes,
        outside_flops=outside.flops,
        outside_traffic_bytes=outside.traffic_bytes,
    )


_LARGEST = ("activation_bytes", "checkpoint_bytes", "temporary_bytes", "half_copy_bytes")
_MEAN = ("forward_flops", "backward_flops", "forward_traffic_bytes", "backward_traffic_bytes")


def _alike(units: list[UnitDescription]) -> list[UnitDescription]:
    """Give layers of one kind the same numbers, as the planner takes them.

    What layers share (an encoder's output, a bias) is booked on the first that saves or computes
    it: the largest bytes and the mean of the work are right for any of them.
    """
    same: dict[str, list[UnitDescription]] = {}
    for unit in units:
        if unit.is_layer:
            same.setdefault(unit.kind, []).append(unit)
    fields: dict[str, dict[str, Any]] = {
        kind: {name: max(getattr(unit, name) for unit in layers) for name in _LARGEST}
        | {name: sum(getattr(unit, name) for unit in layers) // len(layers) for name in _MEAN}
        for kind, layers in same.items()
    }
    return [replace(unit, **fields[unit.kind]) if unit.is_layer else unit for unit in units]


def _describe_long(
    model: BuiltModel, dtype: torch.dtype, ids: torch.Tensor, precision: str, layers: Layers
) -> ModelDescription | None:
    """Describe a long model by its first layers; None where only all of them will do.

    Each run has a copy of its own: models keep things from their first call on. Whether fewer
    layers say the same is asked at the first batch.
    """
    units = find_units(model.module, layers)
    found = []
    but_for_the_batch = (precision, ids.shape[1], layers)
    lengths = (LAYERS_RUN, LAYERS_RUN // 2)
    for stay in lengths[: 1 if but_for_the_batch in model.agreed else 2]:
        with shortened(model.module, units, stay) as is_long:
            if not is_long:
                return None
            copied = _fake_copy(model.module, dtype).train()
        try:
            found.append(_run_step(copied, ids, precision, layers))
        except Exception:  # it counts on all its layers
            return None
    (described, outside), (fewer, less_outside) = found[0], found[-1]
    everything = lengthened(units, described)
    if everything is None or outside != less_outside or not agree(described, fewer):
        return None
    model.agreed.append(but_for_the_batch)
    return _put_together(everything, outside, ids, precision)


def _fake_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a live module with fake tensors in place of its own; none is read."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=wanted)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


def _described(unit: Unit, note: UnitNote, precision: str) -> UnitDescription:
    _, state, master, _ = _PRECISIONS[precision]
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
        param_bytes=sum(tensor_bytes(p) for p in unit.parameters),
        grad_bytes=sum(tensor_bytes(p) for p in trainable),
        grad_tensors=len(trainable),
        largest_grad_tensor_bytes=max(map(tensor_bytes, trainable), default=0),
        state_bytes=state * num_trainable,
        master_bytes=master * num_trainable,
        activation_bytes=saved,
        # Autocast's cache keeps the half copies of recomputed layers too.
        checkpoint_bytes=min(note.inputs + note.half_copies, saved),
        half_copy_bytes=note.half_copies,
        temporary_bytes=note.temporary,
        forward_flops=note.flops[0],
        backward_flops=note.flops[1],
        forward_traffic_bytes=note.traffic[0],
        backward_traffic_bytes=note.traffic[1],
    )
