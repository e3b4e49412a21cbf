"""Profiles of one model by the size of its inputs: what was measured, and what lies between.

A size is, for each tensor that the model is called with, how many items it has and its longest
side. One size covers another when it is as large in all of them. Between two measured sizes bytes
and seconds are taken from the straight line, which they do not exceed as long as they grow
linearly or faster; beyond the largest nothing is assumed: that is measured again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autohete import _C
from autohete.units import tensors_in

Size = tuple[int, ...]

_GROWING = ("activation_bytes", "checkpoint_bytes", "temporary_bytes")
_TIMES = ("forward_seconds", "backward_seconds", "recompute_seconds")
_PER_OCTAVE = 4  # buckets between a size and its double


def size_of(inputs: Any) -> Size:
    """Return the size of what a model is called with; empty where there are no tensors."""
    return tuple(
        number
        for tensor in tensors_in(inputs)
        if tensor.dim() > 0
        for number in (tensor.numel(), max(tensor.shape))
    )


def covers(large: Size, small: Size) -> bool:
    """Whether inputs of the first size need no less of anything than those of the second."""
    return len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))


def bucket_of(size: Size) -> Size:
    """Return the size rounded up, so that plans can be kept for few sizes."""
    return tuple(_rounded_up(number) for number in size)


def _rounded_up(number: int) -> int:
    if number < 2:
        return number
    step = math.ceil(math.log2(number) * _PER_OCTAVE - 1e-9)
    return max(number, math.floor(2 ** (step / _PER_OCTAVE)))


@dataclass
class _Measured:
    size: Size
    profile: _C.Profile


class SizedProfiles:
    """What was measured so far."""

    def __init__(self) -> None:
        self._measured: list[_Measured] = []

    def add(self, size: Size, profile: _C.Profile) -> None:
        """Take up a measurement; an older one of the same size is dropped."""
        self._measured = [m for m in self._measured if m.size != size]
        self._measured.append(_Measured(size, profile))

    def forget(self, size: Size) -> None:
        """Drop what was measured for sizes that cover this one: it turned out too small."""
        self._measured = [m for m in self._measured if not covers(m.size, size)]

    def need_less(self, saved: int) -> None:
        """Take bytes of the device, which no step needs any more, from what was measured."""
        for one in self._measured:
            one.profile.fixed_device_bytes -= saved

    def covers(self, size: Size) -> bool:
        """Whether at() knows the size."""
        return any(covers(m.size, size) for m in self._measured)

    def largest(self) -> list[Size]:
        """Return the sizes that no other one covers."""
        sizes = [m.size for m in self._measured]
        return [s for s in sizes if not any(t != s and covers(t, s) for t in sizes)]

    def measured_at(self, size: Size) -> _C.Profile:
        """Return the measurement of exactly this size."""
        return next(m.profile for m in self._measured if m.size == size)

    def at(self, size: Size) -> _C.Profile | None:
        """Return a profile that inputs of this size do not exceed, None where none is known."""
        above = [m for m in self._measured if covers(m.size, size)]
        if not above:
            return None
        high = min(above, key=lambda m: m.size)
        below = [m for m in self._measured if covers(size, m.size)]
        if not below:
            return high.profile
        low = max(below, key=lambda m: m.size)
        share = max(
            ((s - a) / (b - a) for s, a, b in zip(size, low.size, high.size, strict=True) if b > a),
            default=1.0,
        )
        return blend(low.profile, high.profile, share)

    def beyond(self, size: Size, power: float) -> _C.Profile | None:
        """Return a guess for a larger size: what is kept grows by that power of the sizes' ratio.

        With 1 it is on the low side, with 2 on the high side. None where nothing is comparable.
        """
        below = [m for m in self._measured if covers(size, m.size)]
        if not below:
            return None
        low = max(below, key=lambda m: m.size)
        ratio = max(s / a for s, a in zip(size, low.size, strict=True) if a > 0)
        factor = ratio**power
        profile = _C.Profile(low.profile)
        units = []
        for unit in low.profile.units:
            grown = _C.UnitProfile(unit)
            grown.activation_bytes = int(unit.activation_bytes * factor)
            grown.checkpoint_bytes = int(unit.checkpoint_bytes * ratio)
            if power > 1:
                # Gradients were taken off what was measured, and do not grow.
                grown.temporary_bytes = int((unit.temporary_bytes + unit.grad_bytes) * factor)
            units.append(grown)
        profile.units = units
        if power > 1:
            profile.fixed_device_bytes = int(profile.fixed_device_bytes * factor)
        return profile


def blend(low: _C.Profile, high: _C.Profile, share: float) -> _C.Profile:
    """Return the profile at `share` of the way from one to the other."""

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    profile = _C.Profile(high)
    units = []
    for a, b in zip(low.units, high.units, strict=True):
        unit = _C.UnitProfile(b)
        for name in _GROWING:
            setattr(unit, name, math.ceil(between(getattr(a, name), getattr(b, name))))
        for name in _TIMES:
            setattr(unit, name, between(getattr(a, name), getattr(b, name)))
        units.append(unit)
    profile.units = units
    profile.fixed_device_bytes = math.ceil(between(low.fixed_device_bytes, high.fixed_device_bytes))
    profile.outside_seconds = between(low.outside_seconds, high.outside_seconds)
    profile.loop_seconds = between(low.loop_seconds, high.loop_seconds)
    return profile


def upper_of(one: _C.Profile, other: _C.Profile) -> _C.Profile:
    """Return a profile that needs what either needs."""
    profile = _C.Profile(one)
    units = []
    for a, b in zip(one.units, other.units, strict=True):
        unit = _C.UnitProfile(a)
        for name in (*_GROWING, *_TIMES):
            setattr(unit, name, max(getattr(a, name), getattr(b, name)))
        units.append(unit)
    profile.units = units
    profile.fixed_device_bytes = max(one.fixed_device_bytes, other.fixed_device_bytes)
    profile.outside_seconds = max(one.outside_seconds, other.outside_seconds)
    profile.loop_seconds = max(one.loop_seconds, other.loop_seconds)
    profile.gradients_persist = one.gradients_persist or other.gradients_persist
    return profile


def same_bytes(one: _C.Profile, other: _C.Profile) -> bool:
    """Whether two profiles of one model differ in seconds and rates only."""
    alike = zip(one.units, other.units, strict=True)
    return one.fixed_device_bytes == other.fixed_device_bytes and all(
        getattr(a, name) == getattr(b, name) for a, b in alike for name in _GROWING
    )
