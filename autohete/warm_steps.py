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
from autohete.planning.profile_file import UNIT_SECONDS
from autohete.rank_times import ExchangeTimes, Seen, SeenStep
from autohete.units import Unit

_AT_ONCE = 1e18  # bytes per second


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
            self.parts_seconds = self._exchange.ranks.parts_seconds
        self.exchange_times = ExchangeTimes() if self._exchange else None
        self.has_begun = False
        self.whole_seconds: float | None = None
        """From the forward to the end of step(), without waits and exchange; None: not known."""
        self.ended_at = 0.0

    def begin(self) -> None:
        super().begin()
        self.has_begun = True

    def begins_after(self, other: WarmStep) -> float:
        """Seconds from another step's end, without waits."""
        return self._begin[0] - other.ended_at

    def _first_run(
        self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs)  # what it saves is known

    def step_over(self, one_pass: bool) -> None:
        """step() is about to return.

        Args:
            one_pass: no other forward has run since this one.
        """
        self.ended_at = self._clock()
        if one_pass and self._counts_the_loop:
            self.whole_seconds = self.ended_at - self._begin[0]
        if self._exchange:
            self._packed += self._exchange.packing_seconds
            self.parts_seconds = self._exchange.ranks.parts_seconds

    def backward_of_units(self) -> list[float]:
        return [one.backward_seconds + one.recompute_seconds for one in self.measures]

    def pack_rate(self) -> float | None:
        """Bytes per second at which gradients were laid out and taken up; None: not known."""
        if self._exchange is None or self._packed <= 0:
            return None
        return 2 * self._exchange.exchanged_bytes() / self._packed or None


class WarmSteps:
    """As many steps as are timed: whatever else the machine does falls on one of them, say."""

    SETTLING = 3  # steps under a plan before: the second copies of early updates are new, say
    NUM = 15

    def __init__(self, make: Callable[[], WarmStep], num_steps: int) -> None:
        self._make = make
        self._from_step = num_steps + self.SETTLING
        self._over: list[WarmStep] = []
        self._seen: Seen = {}
        self._between: list[float] = []
        self._num_steps = -2  # when the last was over
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

    def exchange_times(self) -> ExchangeTimes | None:
        """Return what the exchange of gradients reports to."""
        return self._current.exchange_times if self._current else None

    def step_over(self, num_steps: int) -> None:
        """step() is about to return.

        Args:
            num_steps: taken so far.
        """
        if self._current is not None and self._current.complete:
            self._current.step_over(self._one_pass)
            before = self._over[-1] if num_steps == self._num_steps + 1 else None
            if before:
                self._between.append(self._current.begins_after(before))
            self._over.append(self._current)
            self._num_steps = num_steps
            whole, times = self._current.whole_seconds, self._current.exchange_times
            if whole is not None and times is not None:
                gathers = self._current.parts_seconds - before.parts_seconds if before else None
                backward = self._current.backward_of_units()
                compute = [*backward, whole - sum(backward)]
                self._seen[num_steps] = SeenStep(compute, gathers, times.seconds())
            self._current = None

    def seen(self) -> Seen:
        """Return of each step what only several ranks together can tell the use of."""
        return self._seen

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
        better.loop_seconds = 0.0
        wholes = [step.whole_seconds for step in self._over if step.whole_seconds is not None]
        if wholes:
            known = _C.lane_seconds(_without_packing(better), plan)["compute"]
            between = median(self._between) if self._between else 0.0
            better.loop_seconds = max(median(wholes) + between - float(known), 0.0)
        return better

    def refine_rates(self, rates: _C.RankProfile) -> None:
        """Put in what laying out and taking up took, beside all else."""
        packed = [rate for step in self._over if (rate := step.pack_rate()) is not None]
        if packed:
            rates.pack_bytes_per_second = median(packed)
            rates.compute_share_during_collective = 1.0  # it is in the seconds of these steps


def _without_packing(profile: _C.Profile) -> _C.Profile:
    """Gradients are laid out and taken up within what counts as their exchange."""
    without = _C.Profile(profile)
    if without.ranks.num_ranks > 1:
        ranks = without.ranks
        ranks.pack_bytes_per_second = _AT_ONCE
        without.ranks = ranks
    return without


def _take_seconds(unit: _C.UnitProfile, seen: list[UnitMeasure]) -> None:
    before = unit.forward_seconds
    for name in UNIT_SECONDS:
        measured = [seconds for one in seen if (seconds := getattr(one, name)) > 0]
        if measured:
            setattr(unit, name, median(measured))
        elif name == "recompute_seconds" and before > 0:  # kept: as much quicker as its forward
            unit.recompute_seconds *= unit.forward_seconds / before
