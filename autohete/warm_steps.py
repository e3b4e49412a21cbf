"""Later steps, timed only: a first one takes times that no other takes.

It makes threads and handles, loads kernels and meets memory that nobody has touched, and it runs
under the plan that needs least. Its bytes hold; its seconds are taken from a few steps that come
when the plan has been in use for a few (decision 6). They are steps like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from autohete import _C
from autohete.devices import Side
from autohete.exchange import GradientExchange
from autohete.measure import StepMeter, UnitMeasure
from autohete.units import Unit

_AT_ONCE = 1e18  # bytes per second
_TIMES = ("forward_seconds", "backward_seconds", "recompute_seconds")


class _OnlyTime:
    """A side and an engine of which a meter sees no bytes."""

    def __init__(self, side: Side, engine: _C.Engine) -> None:
        self.clock = side.clock
        self.counters = engine.counters

    def used(self) -> int:
        return 0

    peak = others = device_gradient_bytes = used

    def reset_peak(self) -> None: ...


class WarmStep(StepMeter):
    """Collects one step's seconds; the hooks call it in their order, then `step_over`."""

    def __init__(
        self, side: Side, units: list[Unit], engine: _C.Engine, exchange: GradientExchange | None
    ) -> None:
        only_time: Any = _OnlyTime(side, engine)
        exchanged = (lambda: exchange.seconds) if exchange else None
        super().__init__(only_time, units, only_time, exchanged)
        # What the loop's thread does beside a GPU's compute is hidden by it, more or less.
        self._counts_the_loop = side.torch_device.type == "cpu"
        # Likewise, collectives of a GPU are only started by the loop's thread.
        self._exchange = exchange if self._counts_the_loop else None
        if self._exchange:
            self._packed = -self._exchange.packing_seconds
        self.has_begun = False
        self.loop_seconds: float | None = None
        """From the forward to the end of step(), without waits and exchange; None: not known."""

    def begin(self) -> None:
        super().begin()
        self.has_begun = True

    def _first_run(
        self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs)  # what it saves is known

    def step_over(self, one_pass: bool) -> None:
        """step() is about to return.

        Args:
            one_pass: no other forward has run since this one.
        """
        if one_pass and self._counts_the_loop:
            self.loop_seconds = self._clock() - self._begin[0]
        if self._exchange:
            self._packed += self._exchange.packing_seconds

    def pack_rate(self) -> float | None:
        """Bytes per second at which gradients were laid out and taken up; None: not known."""
        if self._exchange is None or self._packed <= 0:
            return None
        return 2 * self._exchange.exchanged_bytes() / self._packed or None


class WarmSteps:
    """As many steps as are timed: whatever else the machine does falls on one of them, say."""

    SETTLING = 3  # steps under a plan before: the second copies of early updates are new, say
    NUM = 5

    def __init__(self, make: Callable[[], WarmStep], num_steps: int) -> None:
        self._make = make
        self._from_step = num_steps + self.SETTLING
        self._over: list[WarmStep] = []
        self._current: WarmStep | None = None
        self._one_pass = True

    def forward_begins(self, num_steps: int, goes_on: bool) -> None:
        """A forward of the size that is timed, or another one where a step `goes_on`, begins."""
        current = self._current
        if current is None:
            if num_steps >= self._from_step and not goes_on and not self.are_over():
                self._current, self._one_pass = self._make(), True
        elif current.complete:
            self._one_pass = False
        elif current.has_begun:  # two forwards, then their backwards
            self._current = None

    def timing(self) -> WarmStep | None:
        """Return what the hooks call."""
        current = self._current
        return None if current is None or current.complete else current

    def left_by_an_exception(self) -> None:
        self._current = None

    def step_over(self) -> None:
        """step() is about to return."""
        if self._current is not None and self._current.complete:
            self._current.step_over(self._one_pass)
            self._over.append(self._current)
            self._current = None

    def are_over(self) -> bool:
        return len(self._over) == self.NUM

    def refined(self, profile: _C.Profile, plan: _C.Plan) -> _C.Profile:
        """Return a first step's profile with the seconds of these, which were under a plan."""
        better = _C.Profile(profile)
        units = [_C.UnitProfile(unit) for unit in profile.units]
        for kind in {unit.kind for unit in units}:
            same = [i for i, unit in enumerate(units) if unit.kind == kind]
            seen = [step.measures[i] for step in self._over for i in same]
            for i in same:
                _take_seconds(units[i], [measure for measure in seen if measure.calls])
        better.units = units
        better.outside_seconds = median(step.outside_seconds() for step in self._over)
        loops = [step.loop_seconds for step in self._over if step.loop_seconds is not None]
        if loops:
            inside = _seconds_inside(better, plan)
            better.outside_seconds = max(median(loops) - inside, better.outside_seconds)
        return better

    def refine_rates(self, rates: _C.RankProfile) -> None:
        """Put in what laying out and taking up took, beside all else."""
        packed = [rate for step in self._over if (rate := step.pack_rate()) is not None]
        if packed:
            rates.pack_bytes_per_second = median(packed)
            rates.compute_share_during_collective = 1.0  # it is in the seconds of these steps


def _seconds_inside(profile: _C.Profile, plan: _C.Plan) -> float:
    """What of a step's compute is the units', updates on the device among it, packing is not."""
    inside = _C.Profile(profile)
    inside.outside_seconds = 0.0
    if inside.ranks.num_ranks > 1:
        ranks = inside.ranks
        ranks.pack_bytes_per_second = _AT_ONCE
        inside.ranks = ranks
    return float(_C.lane_seconds(inside, plan)["compute"])


def _take_seconds(unit: _C.UnitProfile, seen: list[UnitMeasure]) -> None:
    before = unit.forward_seconds
    for name in _TIMES:
        measured = [seconds for one in seen if (seconds := getattr(one, name)) > 0]
        if measured:
            setattr(unit, name, median(measured))
        elif name == "recompute_seconds" and before > 0:  # kept: as much quicker as its forward
            unit.recompute_seconds *= unit.forward_seconds / before
