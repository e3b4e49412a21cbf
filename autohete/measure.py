"""A training step, measured while it runs with every layer recomputed.

Nothing runs twice and nothing is thrown away: the step is an ordinary one. It gives, per unit, the
seconds of forward and backward, the bytes kept for backward with and without checkpointing (the
recomputed forward shows the latter), and the largest extra inside; and what no unit owns. What
becomes of it is measured_profile.py's business.

Device memory is read net of gradients that stand as `p.grad`, since plans place those. A gradient
that autograd holds back, as that of a tied weight from its second use on, is among the rest.

Units are walked in their order. A call out of that order (the head that is tied to the embedding)
belongs to what lies between the last unit's forward and its backward: the loss, and what is around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from autohete.devices import Side
from autohete.units import Unit, tensors_in


class Gradients(Protocol):
    """What the meter asks the engine for."""

    def device_gradient_bytes(self) -> int: ...

    def counters(self) -> dict[str, Any]: ...


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
    backward_held_bytes: int = 0
    """In use when its backward began, without gradients and what was there before the step."""
    unsaved_input_bytes: int = 0
    """Of inputs that are freed after it, unless it is recomputed."""
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


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_saved(out: Tensor) -> bool:
    """Whether backward keeps the output itself: its own node does, or it is part of something."""
    node = out.grad_fn
    kept = ("_saved_result", "saved_tensors")
    return node is None or out._is_view() or any(hasattr(node, name) for name in kept)


class StepMeter:
    """Collects one step; the hooks call it in their order.

    Args:
        exchanged: seconds that their thread has spent on the exchange with other ranks so far.
    """

    def __init__(
        self,
        side: Side,
        units: list[Unit],
        engine: Gradients,
        exchanged: Callable[[], float] | None = None,
    ) -> None:
        self._exchanged = exchanged
        self._side = side
        self._engine = engine
        self.measures = [UnitMeasure() for _ in units]
        self._start: tuple[float, int] = (0.0, 0)
        self._begin = (0.0, 0)
        self._others = 0
        self._last = -1
        self._late: set[int] = set()
        """Units that were called out of order too, or around others."""
        self._after_last = 0
        """Net of the last unit's forward."""
        self._in_units = False
        """Whether a unit runs or backward has come to the units: not the loss."""
        self._peak = 0
        self._loss_peak = 0
        self._open_backward: int | None = None
        self._inputs: dict[int, tuple[int, int]] = {}
        self._seconds = 0.0
        self.complete = False

    def begin(self) -> None:
        self._side.reset_peak()
        self._begin = (self._clock(), self._net())
        self._others = self._side.others()
        self._after_last = self._begin[1]

    def _net(self) -> int:
        return self._side.used() - self._engine.device_gradient_bytes()

    def _clock(self) -> float:
        """Seconds that did not pass in waits: those are the links', the CPU's and the ranks'."""
        waited = float(self._engine.counters()["wait_seconds"])
        if self._exchanged is not None:
            waited += self._exchanged()
        return self._side.clock() - waited

    def _take_peak(self) -> int:
        """Peak since the last call, folded into the step's."""
        peak = self._side.peak()
        self._peak = max(self._peak, peak)
        if not self._in_units:
            self._loss_peak = max(self._loss_peak, peak)
        self._side.reset_peak()
        return peak

    # ---------------------------------------------------------------- forward

    def forward_begins(self, unit: int) -> None:
        if unit < self._last:
            self._late.add(unit)
            return
        self._in_units = True
        self._take_peak()
        self._loss_peak = 0  # of what follows the last unit in order only
        self._last = unit
        self._start = (self._clock(), self._side.used())

    def forward_ends(self, unit: int) -> None:
        if unit < self._last:
            self._late.add(unit)  # others ran inside it: its backward begins with the loss, too
            return
        seconds, used = self._start
        measure = self.measures[unit]
        now = self._side.used()
        measure.forward_seconds += self._clock() - seconds
        measure.kept_bytes += max(now - used, 0)
        measure.forward_extra_bytes = max(measure.forward_extra_bytes, self._take_peak() - now)
        measure.calls += 1
        self._after_last = self._net()
        self._in_units = False

    def forward_over(self) -> None:
        self._take_peak()

    # ---------------------------------------------------------------- backward

    def backward_begins(self, unit: int) -> None:
        # The hook that opens a unit runs before the one that closes the unit after it: both hang
        # on the tensor between them, in the order of the forward.
        if self._open_backward is not None:
            self.backward_ends(self._open_backward)
        self._take_peak()
        if not self._in_units and unit in self._late and unit != self._last:
            return
        self._open_backward, self._in_units = unit, True
        self._start = (self._clock(), self._side.used())
        measure = self.measures[unit]
        held = self._net() - self._begin[1]
        measure.backward_held_bytes = max(measure.backward_held_bytes, held)

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
        measure.backward_seconds += max(self._clock() - seconds - measure.recompute_seconds, 0.0)
        held = used + measure.recomputed_bytes
        measure.backward_extra_bytes = max(measure.backward_extra_bytes, self._take_peak() - held)

    def backward_over(self) -> None:
        if self._open_backward is not None:
            self.backward_ends(self._open_backward)
        self._take_peak()
        self._seconds = self._clock() - self._begin[0]
        self.complete = True

    def metered(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a checkpointed forward: its second run is the recomputation."""
        runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return self._first_run(unit, forward, args, kwargs)
            self._take_peak()
            seconds, used = self._clock(), self._side.used()
            freed = 0  # as soon as this returns
            try:
                out = forward(*args, **kwargs)
                freed = sum(t.nbytes for t in tensors_in(out) if not _is_saved(t))
                return out
            except _StopRecomputationError as stop:
                stop.with_traceback(None)  # the frames it came through hold tensors
                raise
            finally:
                self.recomputed(unit, self._clock() - seconds, used + freed)

        return run

    def _first_run(
        self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a checkpointed forward and see which of its inputs it saves for backward itself."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return forward(*args, **kwargs)
        saved: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            saved.add(_storage(tensor))
            return hooks[0](tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, hooks[1]):
            out = forward(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)):
            if tensor.grad_fn is not None:
                self._note_input(unit, tensor, _storage(tensor) in saved)
        return out

    def _note_input(self, unit: int, tensor: Tensor, is_saved: bool) -> None:
        """An input that only this unit has, and does not save, is gone once the unit has run:
        unless the unit is recomputed, which keeps it.
        """
        key = _storage(tensor)
        if key in self._inputs:
            other, num_bytes = self._inputs[key]
            self.measures[other].unsaved_input_bytes -= num_bytes
            self._inputs[key] = (other, 0)
            return
        num_bytes = 0 if is_saved else tensor.untyped_storage().nbytes()
        self._inputs[key] = (unit, num_bytes)
        self.measures[unit].unsaved_input_bytes += num_bytes

    # ---------------------------------------------------------------- what it saw

    @property
    def last_unit(self) -> int:
        """The last one in order that ran; -1 where none did."""
        return self._last

    def peak(self) -> int:
        """The largest device memory in use during the step, in bytes."""
        return self._peak

    def outside_kept_bytes(self) -> int:
        """What no unit keeps, from before the last unit to the end: inputs, masks, buffers."""
        inside = sum(m.kept_bytes for m in self.measures)
        return max(self._after_last - self._begin[1] - inside, 0)

    def other_bytes(self) -> int:
        """What was there before the step and is neither the engine's nor activations."""
        return self._others

    def outside_extra_bytes(self) -> int:
        """The largest extra between the last unit's forward and its backward: logits, the loss."""
        return max(self._loss_peak - self._after_last, 0)

    def outside_seconds(self) -> float:
        """What the pass took beside its units: the loss, calls out of order, the loop."""
        inside = sum(
            m.forward_seconds + m.backward_seconds + m.recompute_seconds for m in self.measures
        )
        return max(self._seconds - inside, 0.0)
