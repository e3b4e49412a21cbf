"""What steps that ran show of collectives and of waits among ranks.

What one rank sees of a collective begins when it came to it, and ends when all have sent. The last
to come waits for no other, and which one that is changes from one to the next; so what ranks see
counts in the mean, and of compute, between two places where they meet, what the slowest does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from autohete import _C
from autohete.planning.profile_file import PASS_SECONDS, UNIT_SECONDS

_AT_ONCE = 1e15  # bytes per second; what moves next to nothing may seem quicker still


@dataclass
class SeenStep:
    """Seconds of a step that a rank saw."""

    compute: list[float]
    """Of each unit's backward, which the others wait for, and of all else until step() returned."""
    gathers: float | None
    """Parts brought together since the step before it; None: not known."""
    exchanges: list[tuple[int, float]]
    """Of units, in the order in which they were sent."""


Seen = dict[int, SeenStep]
"""By the steps taken before."""


@dataclass
class _Way:
    unit: int
    begin: float
    num_parts: int
    ends: list[float] = field(default_factory=list)
    landed: float = 0.0

    def end(self) -> float:
        whole = len(self.ends) == self.num_parts
        return min(max(self.ends), self.landed) if whole else self.landed


class ExchangeTimes:
    """Of one step's gradients. What is on its way when the step is over does not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ways: list[_Way] = []
        self._num_landed = 0

    def sent(self, unit: int, works: list[Any]) -> None:
        """The collectives of a unit have been started."""
        way = _Way(unit, self._clock(), len(works))
        self._ways.append(way)
        for work in works:
            with contextlib.suppress(RuntimeError):  # a backend without futures: waits tell, later
                work.get_future().add_done_callback(lambda _: way.ends.append(self._clock()))

    def landed(self) -> None:
        """The unit that was sent first of those on their way has been waited for."""
        self._ways[self._num_landed].landed = self._clock()
        self._num_landed += 1

    def seconds(self) -> list[tuple[int, float]]:
        """Per unit from when it was sent, or the one before it had arrived, until it had."""
        taken, before = [], 0.0
        for way in self._ways[: self._num_landed]:
            end = way.end()
            taken.append((way.unit, max(end - max(way.begin, before), 0.0)))
            before = max(before, end)
        return taken


def refine(profile: _C.Profile, plan: _C.Plan, of_ranks: list[Seen], *, rates: bool) -> None:
    """Make compute and collectives of a profile take what they took in steps under a plan.

    Args:
        profile: of the rank that computes longest.
        of_ranks: what each rank saw; where they saw no step in common, nothing changes.
        rates: of collectives, too.
    """
    common = sorted(set.intersection(*(set(seen) for seen in of_ranks)))
    steps = [[seen[step] for seen in of_ranks] for step in common]
    if not steps:
        return
    _scale_compute(profile, _longer_by(steps))
    if not rates:
        return
    simulated = _C.simulate(profile, plan, _C.policy_of(plan.strategy), True)
    ranks = profile.ranks
    if (factor := _exchanges_longer_by(steps, simulated)) is not None:
        ranks.exchange_bytes_per_second = _rate(ranks.exchange_bytes_per_second, factor)
        ranks.exchange_latency_seconds *= factor
    if (factor := _gathers_longer_by(steps, simulated)) is not None:
        ranks.gather_bytes_per_second = _rate(ranks.gather_bytes_per_second, factor)
        ranks.gather_latency_seconds *= factor
    profile.ranks = ranks


def _longer_by(steps: list[list[SeenStep]]) -> float:
    """How many times as long as the slowest rank do the slowest of each stretch compute."""
    stretches = [zip(*(rank.compute for rank in ranks), strict=True) for ranks in steps]
    together = median(sum(max(of_ranks) for of_ranks in stretch) for stretch in stretches)
    slowest = max(median(sum(step.compute) for step in rank) for rank in zip(*steps, strict=True))
    return together / slowest if slowest > 0 else 1.0


def _scale_compute(profile: _C.Profile, factor: float) -> None:
    units = [_C.UnitProfile(unit) for unit in profile.units]
    for unit in units:
        for name in UNIT_SECONDS:
            setattr(unit, name, factor * getattr(unit, name))
    profile.units = units
    for name in PASS_SECONDS:
        setattr(profile, name, factor * getattr(profile, name))


def _exchanges_longer_by(steps: list[list[SeenStep]], simulated: _C.Simulation) -> float | None:
    took: dict[int, list[float]] = {}
    for ranks in steps:
        orders = [[unit for unit, _ in rank.exchanges] for rank in ranks]
        if all(order == orders[0] for order in orders):
            for ways in zip(*(rank.exchanges for rank in ranks), strict=True):
                took.setdefault(ways[0][0], []).append(fmean(seconds for _, seconds in ways))
    expected = _unit_seconds(simulated, _C.SimulatedLane.EXCHANGE)
    both = set(took) & set(expected)
    return _ratio(sum(median(took[unit]) for unit in both), sum(expected[unit] for unit in both))


def _gathers_longer_by(steps: list[list[SeenStep]], simulated: _C.Simulation) -> float | None:
    took = [
        fmean(known)
        for ranks in steps
        if len(known := [r.gathers for r in ranks if r.gathers is not None]) == len(ranks)
    ]
    if not took:
        return None
    return _ratio(median(took), sum(_unit_seconds(simulated, _C.SimulatedLane.GATHER).values()))


def _unit_seconds(simulated: _C.Simulation, lane: _C.SimulatedLane) -> dict[int, float]:
    """What a lane takes for each unit in a step."""
    taken: dict[int, list[float]] = {}
    for span in simulated.spans:
        if span.lane == lane:
            taken.setdefault(span.unit, []).append(span.end_seconds - span.start_seconds)
    return {unit: median(seconds) for unit, seconds in taken.items()}


def _rate(before: float, factor: float) -> float:
    return min(before / factor, _AT_ONCE)


def _ratio(took: float, expected: float) -> float | None:
    return took / expected if took > 0 and expected > 0 else None
