"""The first training step, measured while it runs under the safest plan.

Nothing runs twice and nothing is thrown away: the step is an ordinary one. It gives, per unit, the
seconds of forward and backward, the bytes kept for backward with and without checkpointing (the
recomputed forward shows the latter), and the largest extra inside; and what no unit owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from autohete import _C
from autohete.devices import Side
from autohete.units import Unit

_UPLOAD_LANE, _DOWNLOAD_LANE, _CPU_LANE = 1, 2, 3


@dataclass
class UnitMeasure:
    """What one unit did in one forward and backward."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    forward_extra_bytes: int = 0
    """Largest extra inside a forward, over what it keeps; saved tensors are among it when the
    forward is checkpointed."""
    recompute_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    """Its own gradients among them."""
    calls: int = 0

    def temporary_bytes(self, grad_bytes: int) -> int:
        """The largest extra beside what is saved for backward.

        The planner counts gradients by themselves, and the saved tensors of a recomputed unit too.
        """
        return max(
            self.forward_extra_bytes - self.recomputed_bytes,
            self.recompute_extra_bytes,
            self.backward_extra_bytes - grad_bytes,
            0,
        )


class StepMeter:
    """Collects one step; the hooks call it in their order."""

    def __init__(self, side: Side, units: list[Unit]) -> None:
        self._side = side
        self._units = units
        self.measures = [UnitMeasure() for _ in units]
        self._start: tuple[float, int] = (0.0, 0)
        self._begin_used = 0
        self._others = 0
        self._after_forward = 0
        self._peak = 0
        self._outside_peak = 0
        self._open_backward: int | None = None
        self._in_units = False
        """Whether backward has left the loss."""
        self.complete = False

    def begin(self) -> None:
        self._side.reset_peak()
        self._begin_used = self._side.used()
        self._others = self._side.others()

    def _take_peak(self) -> int:
        """Peak since the last call, folded into the step's."""
        peak = self._side.peak()
        self._peak = max(self._peak, peak)
        self._side.reset_peak()
        return peak

    def forward_begins(self, unit: int) -> None:
        self._take_peak()
        self._start = (self._side.clock(), self._side.used())

    def forward_ends(self, unit: int) -> None:
        seconds, used = self._start
        measure = self.measures[unit]
        now = self._side.used()
        measure.forward_seconds += self._side.clock() - seconds
        measure.kept_bytes += max(now - used, 0)
        measure.forward_extra_bytes = max(measure.forward_extra_bytes, self._take_peak() - now)
        measure.calls += 1

    def forward_over(self) -> None:
        self._take_peak()
        self._after_forward = self._side.used()

    def backward_begins(self, unit: int) -> None:
        # The hook that opens a unit runs before the one that closes the unit after it: both hang
        # on the tensor between them, in the order of the forward.
        if self._open_backward is not None:
            self.backward_ends(self._open_backward)
        peak = self._take_peak()
        if not self._in_units:
            self._outside_peak = max(self._outside_peak, peak - self._after_forward)
        self._open_backward, self._in_units = unit, True
        self._start = (self._side.clock(), self._side.used())

    def recomputed(self, unit: int, seconds: float, used_before: int) -> None:
        measure = self.measures[unit]
        now = self._side.used()
        measure.recompute_seconds += seconds
        measure.recomputed_bytes += max(now - used_before, 0)
        measure.recompute_extra_bytes = max(measure.recompute_extra_bytes, self._take_peak() - now)

    def backward_ends(self, unit: int) -> None:
        if self._open_backward != unit:
            return
        self._open_backward = None
        seconds, used = self._start
        measure = self.measures[unit]
        measure.backward_seconds += max(
            self._side.clock() - seconds - measure.recompute_seconds, 0.0
        )
        held = used + measure.recomputed_bytes
        measure.backward_extra_bytes = max(measure.backward_extra_bytes, self._take_peak() - held)

    def backward_over(self) -> None:
        if self._open_backward is not None:
            self.backward_ends(self._open_backward)
        self._take_peak()
        self.complete = True

    def metered(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a checkpointed forward: its second run is the recomputation."""
        runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return forward(*args, **kwargs)
            self._take_peak()
            seconds, used = self._side.clock(), self._side.used()
            try:
                return forward(*args, **kwargs)
            finally:  # a recomputation may stop early, by an exception of torch's
                self.recomputed(unit, self._side.clock() - seconds, used)

        return run

    def peak(self) -> int:
        """The largest device memory in use during the step, in bytes."""
        return self._peak

    def outside_kept_bytes(self) -> int:
        """What no unit keeps and lives until backward: copied inputs, logits, the loss; buffers."""
        inside = sum(m.kept_bytes for m in self.measures)
        return max(self._after_forward - self._begin_used - inside, 0) + self._others

    def outside_extra_bytes(self) -> int:
        """The largest extra between the last unit's forward and its backward (the loss)."""
        return max(self._outside_peak, 0)


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


def _kind(unit: Unit, sizes: tuple[int, int, int]) -> str:
    """Equal modules are of two kinds where the optimizer has only some of them, say."""
    _, grad_bytes, state_bytes = sizes
    return f"{unit.kind}/{grad_bytes}/{state_bytes}" + "/edits" * bool(unit.edits_inputs)


def build_profile(
    meter: StepMeter, units: list[Unit], sizes: list[tuple[int, int, int]], rates: dict[str, float]
) -> _C.Profile:
    """Return what the planner needs, layers of one kind averaged.

    Args:
        sizes: per unit, bytes of parameters, gradients and optimizer state.
        rates: of lane_rates().
    """
    profile = _C.Profile()
    kinds = [_kind(unit, size) for unit, size in zip(units, sizes, strict=True)]
    unit_profiles = []
    for unit, size, kind in zip(units, sizes, kinds, strict=True):
        param_bytes, grad_bytes, state_bytes = size
        measured = (m for m, k in zip(meter.measures, kinds, strict=True) if k == kind)
        same = [m for m in measured if m.calls]
        p = _C.UnitProfile()
        p.name, p.kind = unit.name, kind
        p.num_parameters = sum(q.numel() for q in unit.parameters)
        p.param_bytes, p.grad_bytes, p.state_bytes = param_bytes, grad_bytes, state_bytes
        p.master_bytes = param_bytes if grad_bytes else 0
        p.can_offload_parameters = not unit.is_container
        p.can_recompute = unit.is_layer and not unit.edits_inputs
        if same:
            p.forward_seconds = median(m.forward_seconds for m in same)
            p.backward_seconds = median(m.backward_seconds for m in same)
            kept = max(m.kept_bytes for m in same)
            recomputed = max(m.recomputed_bytes for m in same)
            p.checkpoint_bytes = kept if unit.is_layer else 0
            p.activation_bytes = kept + recomputed if unit.is_layer else kept
            p.temporary_bytes = max(m.temporary_bytes(grad_bytes) for m in same)
        unit_profiles.append(p)
    # The loss follows the last unit's forward: its extra coincides with nobody else's.
    # (Units of its kind get it too: the planner takes equal layers as equal.)
    for p in unit_profiles:
        if p.kind == unit_profiles[-1].kind:
            p.temporary_bytes = max(p.temporary_bytes, meter.outside_extra_bytes())
    profile.units = unit_profiles
    profile.fixed_device_bytes = meter.outside_kept_bytes()
    hardware = _C.HardwareProfile()
    hardware.h2d_bytes_per_second = rates.get("h2d", 1e10)
    hardware.d2h_bytes_per_second = rates.get("d2h", 1e10)
    hardware.cpu_params_per_second = rates.get("cpu", 1e9)
    hardware.device_params_per_second = rates.get("device", rates.get("cpu", 1e9))
    profile.hardware = hardware
    return profile
