"""lane_seconds(): the work of each lane in a step, beside what a simulation spends on it."""

from __future__ import annotations

import random

import pytest

from autohete import _C
from tests.plan.reference import layers, make_profile
from tests.plan.test_simulator import exactly, plan_of, policy


def uploads(count: int, window: int, frozen: tuple[int, ...] = (), repeats: int = 1) -> float:
    """Of layers that all live on the host and take a second each to upload."""
    units = layers(count, num_parameters=1, param_bytes=1, grad_bytes=1)
    for i in frozen:
        units[i].grad_bytes, units[i].kind = 0, "frozen"
    profile = make_profile(units, gradient_accumulation_steps=repeats)
    plan = plan_of(profile, parameters=set(range(count)), window=window)
    return float(_C.lane_seconds(profile, plan)["h2d"])


def test_what_the_window_holds_where_the_walk_turns_is_not_uploaded_again() -> None:
    assert uploads(5, window=2) == exactly(10 - 2)
    assert uploads(5, window=2, repeats=3) == exactly(30 - 3 * 2 - 2 * 2)
    assert uploads(5, window=2, frozen=(0, 1)) == exactly(10 - 2 - 2)


def test_what_fits_in_the_window_is_uploaded_once_after_each_update() -> None:
    assert uploads(2, window=2) == exactly(2)
    assert uploads(2, window=8, repeats=3) == exactly(2)
    assert uploads(2, window=2, frozen=(0, 1)) == exactly(0)


def random_layers(rng: random.Random) -> list[_C.UnitProfile]:
    sizes = [100] if rng.random() < 0.5 else [1, 10, 50, 100, 400]
    units = layers(rng.randint(1, 8))
    for i, unit in enumerate(units):
        unit.kind = str(i)
        unit.num_parameters = unit.param_bytes = rng.choice(sizes)
        unit.grad_bytes = 0 if rng.random() < 0.2 else unit.param_bytes
        unit.forward_seconds, unit.backward_seconds = rng.uniform(0, 2), rng.uniform(0, 4)
    return units


@pytest.mark.parametrize("seed", range(500))
def test_no_lane_works_longer_than_a_step(seed: int) -> None:
    """With frozen layers of any size, which may stay in the window over a step's end."""
    rng = random.Random(seed)
    units = random_layers(rng)
    profile = make_profile(
        units,
        h2d_bytes_per_second=10 ** rng.uniform(0, 4),
        d2h_bytes_per_second=10 ** rng.uniform(0, 4),
        cpu_params_per_second=10 ** rng.uniform(1, 4),
        gradient_accumulation_steps=rng.choice([1, 1, 2, 3]),
    )
    state = {i for i in range(len(units)) if rng.random() < 0.7}
    parameters = {i for i in state if rng.random() < 0.8}
    plan = plan_of(profile, state, parameters, window=rng.choice([1, 2, 3, 8]))
    order = policy(
        gated=rng.random() < 0.5,
        priority_order=rng.random() < 0.8,
        iteration_barrier=rng.random() < 0.2,
        synchronous_moves=rng.random() < 0.2,
        early_uploads=rng.random() < 0.2,
        steps=30,
    )
    longest = max(_C.lane_seconds(profile, plan).values())
    assert longest <= _C.simulate(profile, plan, order).step_seconds * (1 + 1e-9)
