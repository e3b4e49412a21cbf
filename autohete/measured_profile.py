"""From a measured step to the planner's profile."""

from __future__ import annotations

from statistics import median
from typing import Any

from autohete import _C
from autohete.measure import StepMeter
from autohete.units import Unit

_UPLOAD_LANE, _DOWNLOAD_LANE, _CPU_LANE = 1, 2, 3


def lane_rates(spans: list[tuple[Any, ...]], num_updated: int) -> dict[str, float]:
    """Return bytes per second of both links and parameters per second of the CPU lane."""
    rates: dict[str, float] = {}
    for lane, name in ((_UPLOAD_LANE, "h2d"), (_DOWNLOAD_LANE, "d2h")):
        measured = [s[5] / (s[4] - s[3]) for s in spans if s[0] == lane and s[5] and s[4] > s[3]]
        if measured:
            rates[name] = median(measured)
    busy = sum(s[4] - s[3] for s in spans if s[0] == _CPU_LANE)
    if busy > 0:
        rates["cpu"] = num_updated / busy
    return rates


def hardware_of(rates: dict[str, float]) -> _C.HardwareProfile:
    """Return the rates as the planner takes them; what was not measured is taken as fast."""
    hardware = _C.HardwareProfile()
    hardware.h2d_bytes_per_second = rates.get("h2d", 1e10)
    hardware.d2h_bytes_per_second = rates.get("d2h", 1e10)
    hardware.cpu_params_per_second = rates.get("cpu", 1e9)
    hardware.device_params_per_second = rates.get("device", rates.get("cpu", 1e9))
    return hardware


def build_profile(
    meter: StepMeter,
    units: list[Unit],
    sizes: list[tuple[int, int, int]],
    hardware: _C.HardwareProfile,
) -> _C.Profile:
    """Return what the planner needs, layers of one kind averaged.

    Args:
        sizes: per unit, bytes of parameters, gradients and optimizer state.
    """
    kinds = [_kind(unit, size) for unit, size in zip(units, sizes, strict=True)]
    profile = _C.Profile()
    described = [
        _describe(meter, unit, size, kinds, kind)
        for unit, size, kind in zip(units, sizes, kinds, strict=True)
    ]
    _add_held(meter, described)
    _add_outside(meter, described)
    profile.units = described
    profile.fixed_device_bytes = meter.outside_kept_bytes() + meter.other_bytes()
    profile.outside_seconds = meter.outside_seconds()
    profile.hardware = hardware
    return profile


def _kind(unit: Unit, sizes: tuple[int, int, int]) -> str:
    """Equal modules are of two kinds where the optimizer has only some of them, say."""
    _, grad_bytes, state_bytes = sizes
    return f"{unit.kind}/{grad_bytes}/{state_bytes}" + "/edits" * bool(unit.edits_inputs)


def _describe(
    meter: StepMeter, unit: Unit, size: tuple[int, int, int], kinds: list[str], kind: str
) -> _C.UnitProfile:
    param_bytes, grad_bytes, state_bytes = size
    p = _C.UnitProfile()
    p.name, p.kind = unit.name, kind
    p.num_parameters = sum(q.numel() for q in unit.parameters)
    p.param_bytes, p.grad_bytes, p.state_bytes = param_bytes, grad_bytes, state_bytes
    p.master_bytes = param_bytes if grad_bytes else 0
    trained = [q for q in unit.parameters if q.requires_grad]
    p.grad_tensors = len(trained)
    largest = max((q.nbytes for q in trained), default=0)
    p.largest_grad_tensor_bytes = min(largest, grad_bytes)
    p.can_offload_parameters = not unit.is_container
    p.can_recompute = unit.is_layer and not unit.edits_inputs
    same = [m for m, k in zip(meter.measures, kinds, strict=True) if k == kind and m.calls]
    if not same:
        return p
    p.forward_seconds = median(m.forward_seconds for m in same)
    p.backward_seconds = median(m.backward_seconds for m in same)
    p.recompute_seconds = median(m.recompute_seconds for m in same)
    kept = max(m.kept_bytes for m in same)
    recomputed = max(m.recomputed_bytes for m in same)
    p.checkpoint_bytes = kept if unit.is_layer else 0
    freed = min(m.unsaved_input_bytes for m in same)
    p.activation_bytes = max(kept + recomputed - freed, 0) if unit.is_layer else kept
    p.temporary_bytes = max(m.temporary_bytes(grad_bytes) for m in same)
    return p


def _add_to_kind(described: list[_C.UnitProfile], kind: str, temporary_bytes: int) -> None:
    """Raise the temporaries of a kind's units: the planner takes equal layers as equal."""
    for p in described:
        if p.kind == kind:
            p.temporary_bytes = max(p.temporary_bytes, temporary_bytes)


def _add_held(meter: StepMeter, described: list[_C.UnitProfile]) -> None:
    """What was there when a unit's backward began and no unit keeps: gradients on their way through
    the graph, and of tied weights the half that waits for the other.
    """
    saved = meter.outside_kept_bytes()
    more: dict[str, int] = {}
    for p, measure in zip(described, meter.measures, strict=True):
        saved += measure.kept_bytes
        held = measure.backward_held_bytes - saved
        if measure.calls and held > 0:
            extra = measure.backward_extra_bytes - p.grad_bytes
            inside = max(extra, measure.recompute_extra_bytes, 0)
            more[p.kind] = max(more.get(p.kind, 0), held + inside)
    for kind, bytes_ in more.items():
        _add_to_kind(described, kind, bytes_)


def _add_outside(meter: StepMeter, described: list[_C.UnitProfile]) -> None:
    """The loss lies between the last unit's forward and its backward, when nobody else runs and the
    unit has no gradient yet.
    """
    if meter.last_unit < 0:
        return
    last = described[meter.last_unit]
    _add_to_kind(described, last.kind, meter.outside_extra_bytes() - last.grad_bytes)
