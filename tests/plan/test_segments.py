"""Runs of identical layers, and periodic patterns as runs of super-layers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autohete import _C
from tests.plan.reference import (
    as_counts,
    formula_seconds,
    layers,
    make_profile,
    make_unit,
    random_profile,
    walk_peak,
)
from tests.plan.settings import random_gpt
from tests.plan.test_formulation import UNLIMITED, solve_glpk, solve_highs, solve_search


def profile_of(kinds: str, **fields: object) -> _C.Profile:
    """One layer a letter; equal letters, equal kinds."""
    units = []
    for i, kind in enumerate(kinds):
        size = 1 + ord(kind) - ord("A")
        sizes = dict.fromkeys(("num_parameters", "param_bytes", "grad_bytes"), size)
        units.append(
            make_unit(f"{i}", kind, activation_bytes=10 * size, checkpoint_bytes=1, **sizes)
        )
    return make_profile(units, **fields)


def shape(profile: _C.Profile) -> list[tuple[int, int]]:
    formulation = _C.formulate(
        profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions(window=2)
    )
    return [(s.count, s.period) for s in formulation.segments]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("E" + "DM" * 4 + "H", [(1, 1), (4, 2), (1, 1)]),
        ("E" + "DDDM" * 3 + "H", [(1, 1), (3, 4), (1, 1)]),
        ("DMDM", [(1, 1)] * 4),  # twice is no pattern
        ("DDDDDD", [(6, 1)]),  # one kind is no pattern of two
        ("DMDMDMD", [(3, 2), (1, 1)]),
        ("DDDMMMDDDMMM", [(3, 1), (3, 1), (3, 1), (3, 1)]),
        ("ABC" * 5 + "AAAA", [(5, 3), (4, 1)]),
    ],
)
def test_a_pattern_that_repeats_three_times_is_a_run_of_super_layers(
    kinds: str, expected: list[tuple[int, int]]
) -> None:
    assert shape(profile_of(kinds)) == expected


@pytest.mark.parametrize("field", ["can_offload_parameters", "param_bytes"])
def test_layers_that_cannot_be_placed_alike_stay_apart(field: str) -> None:
    profile = profile_of("DM" * 3)
    units = profile.units
    for unit in units[1::2]:
        setattr(unit, field, 0)
        if field == "param_bytes":
            unit.grad_bytes = unit.num_parameters = 0
    profile.units = units
    assert shape(profile) == [(1, 1)] * 6


def test_the_same_layer_of_two_periods_must_be_equal() -> None:
    profile = profile_of("DM" * 3)
    units = profile.units
    units[3].activation_bytes += 1
    profile.units = units
    with pytest.raises(ValueError, match="unit 3 of kind M differs from 1"):
        shape(profile)


def test_counts_place_whole_super_layers() -> None:
    profile = profile_of("E" + "DM" * 3)
    units = profile.units
    for unit in units[2::2]:
        unit.checkpoint_bytes = unit.activation_bytes  # recomputing M saves nothing
    profile.units = units
    plan = _C.decode_plan(profile, as_counts([(0, 0, 0), (2, 1, 2)]), 2, spread=False)
    host, again = _C.Tier.HOST, _C.ActivationRule.RECOMPUTE
    assert [u.optimizer_state == host for u in plan.units] == [False] * 3 + [True] * 4
    assert [u.parameters == host for u in plan.units] == [False] * 5 + [True] * 2
    assert [u.activations == again for u in plan.units] == [
        False, True, False, True, False, False, False
    ]  # fmt: skip


def test_memory_rows_of_super_layers_by_hand() -> None:
    # D: 4 parameters, M: 13; states 8 bytes each; activations 40 and 130, checkpoints 1.
    profile = profile_of("DM" * 3)
    units = profile.units
    for unit in units:
        unit.state_bytes = 8 * unit.num_parameters
    profile.units = units
    formulation = _C.formulate(
        profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions(window=2)
    )

    def rows(*counts: int) -> tuple[float, float]:
        values = formulation.evaluate(as_counts([counts]))
        return (
            values[formulation.device] * formulation.device_scale,
            values[formulation.host] * formulation.host_scale,
        )

    # All here: 17 parameters, 136 of state, 17 of gradients and 170 of activations, three times.
    assert rows(0, 0, 0) == pytest.approx((3 * (17 + 136 + 17 + 170), 0))
    # One recomputed: checkpoints of 1 + 1 for its 170.
    assert rows(1, 0, 0) == pytest.approx((3 * (17 + 136 + 17) + 2 * 170 + 2, 0))
    # All recomputed: one M at a time comes back with its 130, of which one was there.
    assert rows(3, 0, 0) == pytest.approx((3 * (17 + 136 + 17) + 3 * 2 + 129, 0))
    # One super-layer away: two slots of the larger layer, its gradients and two leaving of 13.
    device, host = rows(0, 1, 1)
    assert device == pytest.approx(2 * (17 + 136 + 17) + 3 * 170 + 2 * 13 + 3 * 13)
    assert host == pytest.approx(136 + 17 + 17)


def random_periodic(seed: int) -> tuple[_C.Profile, list[tuple[list[_C.UnitProfile], int]]]:
    """A profile with a pattern between other layers, and its (period, repeats)."""
    rng = random.Random(seed)
    profile = random_profile(rng, max_segments=1, max_count=1)
    pattern: list[_C.UnitProfile] = []
    offload = rng.random() < 0.8
    for i in range(rng.choice([2, 2, 3])):
        unit = random_profile(rng, max_segments=1, max_count=1).units[0]
        unit.kind, unit.can_offload_parameters = f"pattern{i}", offload
        pattern.append(unit)
    repeats = rng.randint(3, 4)
    head = _C.UnitProfile(profile.units[0])  # a copy: units is replaced below
    profile.units = [head, *pattern * repeats]
    return profile, [([head], 1), (pattern, repeats)]


def all_points(formulation: _C.Formulation) -> list[list[tuple[int, int, int]]]:
    choices = [
        [
            (c, p, o)
            for c in range(s.max_recompute + 1)
            for o in range(s.max_state + 1)
            for p in range(min(o, s.max_parameters) + 1)
        ]
        for s in formulation.segments
    ]
    return [list(point) for point in itertools.product(*choices)]


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_super_layers_are_the_formula_and_never_below_the_walk(seed: int) -> None:
    profile, segments = random_periodic(seed)
    rng = random.Random(seed)
    options = _C.PlannerOptions(window=rng.choice([1, 2, 3]), gated=rng.random() < 0.5)
    formulation = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)
    assert [s.period for s in formulation.segments] == [1, len(segments[1][0])]
    points = all_points(formulation)
    for point in rng.sample(points, k=min(60, len(points))):
        values = formulation.evaluate(as_counts(point))
        plan = _C.decode_plan(profile, as_counts(point), options.window, spread=False)
        walked = walk_peak(profile, plan)
        assert _C.device_peak_bytes(profile, plan) == walked
        row = values[formulation.device] * formulation.device_scale
        assert row >= walked * (1 - 1e-12)
        host = values[formulation.host] * formulation.host_scale
        assert host == pytest.approx(_C.host_bytes(profile, plan), rel=1e-12)
        expected = formula_seconds(
            profile, point, window=options.window, gated=options.gated, segments=segments
        )
        seconds = values[formulation.step] * formulation.time_scale
        assert seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_every_solver_finds_the_best_super_layers(seed: int) -> None:
    profile, _ = random_periodic(seed)
    rng = random.Random(seed)
    options = _C.PlannerOptions(gated=rng.random() < 0.5)
    least = _C.minimum_device_bytes(profile, UNLIMITED, options)
    budgets = _C.Budgets(int(least * rng.uniform(1, 2)), UNLIMITED)
    formulation = _C.formulate(profile, budgets, options)
    cost = np.array(formulation.objective(_C.Goal.STEP_SECONDS))
    limit = formulation.rows()["upper"][formulation.device] * (1 + 1e-9)
    found = [np.array(formulation.evaluate(as_counts(p))) for p in all_points(formulation)]
    best = min(float(cost @ values) for values in found if values[formulation.device] <= limit)
    for solve in (solve_search, solve_glpk, solve_highs):
        assert solve(formulation) == pytest.approx(best, abs=1e-6, rel=1e-6), solve.__name__


def alternating_gpt(rng: random.Random) -> _C.Profile:
    """A GPT whose every second layer has three times the parameters and half as much compute more.

    That is what a mixture of experts with two of its experts active looks like.
    """
    profile = random_gpt(rng)
    units = profile.units
    for unit in units[2:-1:2]:
        unit.kind = "moe"
        for field in ("num_parameters", "param_bytes", "grad_bytes", "state_bytes"):
            setattr(unit, field, 3 * getattr(unit, field))
        unit.forward_seconds *= 1.5
        unit.backward_seconds *= 1.5
    profile.units = units
    return profile


@pytest.mark.slow
def test_the_formula_predicts_the_simulator_on_alternating_layers() -> None:
    rng = random.Random(31)
    errors = []
    policy = _C.SimulationPolicy()
    policy.gated, policy.steps = False, 8
    for _ in range(200):
        profile = alternating_gpt(rng)
        formulation = _C.formulate(
            profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions(gated=False)
        )
        assert [s.period for s in formulation.segments] == [1, 2, 1]
        middle = formulation.segments[1]
        state = rng.randint(0, middle.count)
        point = [(0, 0, 0), (rng.randint(0, middle.count), rng.randint(0, state), state), (0, 0, 0)]
        formula = formulation.evaluate(as_counts(point))[formulation.step] * formulation.time_scale
        seconds = min(
            _C.simulate(
                profile, _C.decode_plan(profile, as_counts(point), 2, spread=spread), policy
            ).step_seconds
            for spread in (False, True)
        )
        errors.append(abs(formula / seconds - 1))
    print(f"alternating: mean {np.mean(errors):.2%}, p95 {np.quantile(errors, 0.95):.2%}")
    assert np.mean(errors) <= 0.015
    assert np.quantile(errors, 0.95) <= 0.06


def test_a_deep_alternating_model_is_planned_with_three_runs() -> None:
    profile = make_profile(
        layers(1, "embedding", num_parameters=5, param_bytes=10, grad_bytes=10)
        + [
            make_unit(
                f"h.{i}",
                "moe" if i % 2 else "dense",
                num_parameters=30 if i % 2 else 10,
                param_bytes=60 if i % 2 else 20,
                grad_bytes=60 if i % 2 else 20,
                state_bytes=360 if i % 2 else 120,
                activation_bytes=50,
                checkpoint_bytes=5,
                forward_seconds=1.0,
                backward_seconds=2.0,
            )
            for i in range(200)
        ],
    )
    assert shape(profile) == [(1, 1), (100, 2)]
    least = _C.minimum_device_bytes(profile, UNLIMITED, _C.PlannerOptions())
    plan = _C.search_plan(profile, _C.Budgets(least, UNLIMITED), _C.PlannerOptions(), 10.0)
    assert plan.device_peak_bytes <= least


def test_speculation_keeps_a_second_copy_of_what_it_overwrites() -> None:
    """Four bytes of trainable parameters and eight of state, for each unit updated on the host."""
    units = layers(
        4, num_parameters=10, param_bytes=40, grad_bytes=40, state_bytes=80, master_bytes=40
    )
    for speculates in (False, True):
        profile = make_profile(units, speculates=speculates, fixed_host_bytes=7)
        formulation = _C.formulate(
            profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions(gated=False)
        )
        for state, parameters in ((0, 0), (3, 0), (3, 2)):
            counts = as_counts([(0, parameters, state)])
            plan = _C.decode_plan(profile, counts, 2, spread=False)
            expected = 7 + state * (80 + 40 + 40) + (state * (80 + 40) if speculates else 0)
            assert _C.host_bytes(profile, plan) == expected
            row = formulation.evaluate(counts)[formulation.host] * formulation.host_scale
            assert row == pytest.approx(expected, rel=1e-12)
