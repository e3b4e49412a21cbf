"""The priority rule, against a walk that is written out."""

from __future__ import annotations

import pytest

from autohete import _C


@pytest.mark.parametrize("num_units", [1, 2, 3, 7])
def test_next_use_distance_counts_visits_on_the_walk(num_units: int) -> None:
    walk = [(True, k) for k in range(num_units)] + [(False, k) for k in reversed(range(num_units))]
    for here, (forward, position) in enumerate(walk):
        for unit in range(num_units):
            ahead = next(
                d for d in range(1, 2 * num_units + 1) if walk[(here + d) % len(walk)][1] == unit
            )
            assert _C.next_use_distance(forward, position, unit, num_units) == ahead


def test_the_last_unit_of_forward_is_needed_at_once() -> None:
    assert _C.next_use_distance(True, 4, 4, 5) == 1


def test_in_backward_lower_units_come_first_and_then_the_next_forward() -> None:
    distances = [_C.next_use_distance(False, 2, unit, 5) for unit in range(5)]
    assert distances == [2, 1, 5, 6, 7]  # unit 2 itself is next used in the coming forward
