"""The measured step: every unit's seconds are its own, in the order in which hooks fire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autohete.measure import StepMeter


class FakeSide:
    """A side whose clock and memory the test sets."""

    def __init__(self) -> None:
        self.now, self.bytes = 0.0, 0

    def clock(self) -> float:
        return self.now

    def used(self) -> int:
        return self.bytes

    def peak(self) -> int:
        return self.bytes

    def others(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass


class FakeEngine:
    """What the meter asks it for, as the test sets it."""

    def __init__(self) -> None:
        self.gradients, self.waited = 0, 0.0

    def device_gradient_bytes(self) -> int:
        return self.gradients

    def counters(self) -> dict[str, Any]:
        return {"wait_seconds": self.waited, "wait_upload_seconds": self.waited}


def meter_of(num_units: int) -> tuple[FakeSide, StepMeter]:
    side: Any = FakeSide()
    units: Any = [SimpleNamespace() for _ in range(num_units)]
    meter = StepMeter(side, units, FakeEngine())
    meter.begin()
    for unit in range(num_units):
        meter.forward_begins(unit)
        meter.forward_ends(unit)
    return side, meter


def test_a_layers_backward_ends_where_the_next_ones_begins() -> None:
    """The next unit's hook runs first: both hang on the tensor between the two."""
    side, meter = meter_of(3)
    meter.forward_over()
    meter.backward_begins(2)
    side.now = 3.0
    meter.backward_begins(1)
    meter.backward_ends(2)
    side.now = 7.0
    meter.backward_begins(0)
    meter.backward_ends(1)
    side.now = 9.0
    meter.backward_ends(0)
    side.now = 20.0
    meter.backward_over()
    assert [m.backward_seconds for m in meter.measures] == [2.0, 4.0, 3.0]


def test_a_first_unit_that_nothing_closes_ends_with_the_backward() -> None:
    side, meter = meter_of(2)
    meter.forward_over()
    meter.backward_begins(1)
    side.now = 1.0
    meter.backward_begins(0)
    meter.backward_ends(1)
    side.now = 4.0
    meter.backward_over()
    assert [m.backward_seconds for m in meter.measures] == [3.0, 1.0]


def test_only_what_precedes_the_last_units_backward_is_the_losss() -> None:
    side, meter = meter_of(2)
    meter.forward_over()
    side.bytes = 100  # the loss's own
    meter.backward_begins(1)
    side.bytes = 5000
    meter.backward_begins(0)
    meter.backward_ends(1)
    meter.backward_over()
    assert meter.outside_extra_bytes() == 100


def test_a_tied_units_late_call_belongs_to_the_loss() -> None:
    """The head that is tied to the embedding, unit 0, runs after the last unit."""
    side, meter = meter_of(3)
    meter.forward_begins(0)
    side.now, side.bytes = 4.0, 70  # logits
    meter.forward_ends(0)
    meter.forward_over()
    meter.backward_begins(0)  # the head's
    side.now, side.bytes = 9.0, 90
    meter.backward_begins(2)
    meter.backward_begins(1)
    meter.backward_ends(2)
    side.now = 10.0
    meter.backward_begins(0)
    meter.backward_ends(1)
    side.now = 12.0
    meter.backward_over()
    assert [m.backward_seconds for m in meter.measures] == [2.0, 1.0, 0.0]
    assert [m.kept_bytes for m in meter.measures] == [0, 0, 0]
    assert meter.outside_seconds() == 9.0
    assert meter.outside_extra_bytes() == 90


def test_what_waits_between_backwards_is_seen_without_gradients_that_stand() -> None:
    side, meter = meter_of(2)
    engine: Any = meter._engine
    meter.forward_over()
    side.bytes = 500
    engine.gradients = 200
    meter.backward_begins(1)
    assert meter.measures[1].backward_held_bytes == 300


def test_waits_are_no_compute() -> None:
    side, meter = meter_of(1)
    engine: Any = meter._engine
    meter.forward_over()
    side.now, engine.waited = 5.0, 2.0
    meter.backward_begins(0)
    side.now = 6.0
    meter.backward_over()
    assert meter.outside_seconds() == 3.0


def test_a_container_around_the_units_does_not_end_the_loss() -> None:
    side: Any = FakeSide()
    units: Any = [SimpleNamespace() for _ in range(3)]
    meter = StepMeter(side, units, FakeEngine())
    meter.begin()
    meter.forward_begins(0)  # the root, which owns a parameter
    for unit in (1, 2):
        meter.forward_begins(unit)
        meter.forward_ends(unit)
    meter.forward_ends(0)
    meter.forward_over()
    meter.backward_begins(0)
    side.bytes = 300  # the loss's backward
    meter.backward_begins(2)
    side.now = 1.0
    meter.backward_begins(1)
    meter.backward_over()
    assert meter.outside_extra_bytes() == 300
    assert [m.backward_seconds for m in meter.measures] == [0.0, 0.0, 1.0]
