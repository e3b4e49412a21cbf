"""The rows say what the formulas say, and every solver finds their optimum."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from autohete import _C
from autohete.planning.solve import load_glpk
from tests.plan.reference import (
    all_counts,
    as_counts,
    formula_seconds,
    random_profile,
    walk_peak,
)

UNLIMITED = 2**53


def small_instance(seed: int) -> tuple[_C.Profile, _C.PlannerOptions, random.Random]:
    rng = random.Random(seed)
    while True:
        profile = random_profile(rng)
        if len(all_counts(profile)) <= 4000:
            options = _C.PlannerOptions(window=rng.choice([1, 2, 3]), gated=rng.random() < 0.5)
            return profile, options, rng


def budgets_between(
    profile: _C.Profile, options: _C.PlannerOptions, rng: random.Random
) -> _C.Budgets:
    """Budgets that cut somewhere through the plans; sometimes through all of them."""
    points = [_C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)]
    formulation = points[0]
    sample = rng.sample(all_counts(profile), k=min(50, len(all_counts(profile))))
    values = [formulation.evaluate(as_counts(point)) for point in sample]
    device = [v[formulation.device] * formulation.device_scale for v in values]
    host = [v[formulation.host] * formulation.host_scale for v in values]
    return _C.Budgets(
        int(rng.uniform(0.95 * min(device), max(device))),
        int(rng.uniform(min(host), 1.2 * max(host))),
    )


def brute_force(formulation: _C.Formulation, profile: _C.Profile) -> float | None:
    cost = np.array(formulation.objective(_C.Goal.STEP_SECONDS))
    rows = formulation.rows()
    best = None
    for point in all_counts(profile):
        values = np.array(formulation.evaluate(as_counts(point)))
        if values[formulation.device] > rows["upper"][formulation.device] * (1 + 1e-9) or values[
            formulation.host
        ] > rows["upper"][formulation.host] * (1 + 1e-9):
            continue
        objective = float(cost @ values)
        best = objective if best is None else min(best, objective)
    return best


def solve_highs(formulation: _C.Formulation) -> float | None:
    rows = formulation.rows()
    matrix = np.zeros((len(rows["row_lower"]), len(rows["upper"])))
    for r in range(len(rows["row_lower"])):
        for i in range(rows["row_starts"][r], rows["row_starts"][r + 1]):
            matrix[r, rows["columns"][i]] += rows["values"][i]
    upper = np.where(np.array(rows["upper"]) > 1e29, np.inf, rows["upper"])
    result = milp(
        formulation.objective(_C.Goal.STEP_SECONDS),
        constraints=LinearConstraint(matrix, lb=rows["row_lower"]),
        bounds=Bounds(0, upper),
        integrality=np.array(rows["is_integer"], dtype=int),
        options={"mip_rel_gap": 0},
    )
    return None if result.x is None else float(result.fun)


def solve_glpk(formulation: _C.Formulation) -> float | None:
    glpk = load_glpk()
    assert glpk is not None
    cost = formulation.objective(_C.Goal.STEP_SECONDS)
    status, values = glpk.solve(cost=cost, seconds=10.0, **formulation.rows())
    assert status in ("optimal", "infeasible"), status
    return float(np.dot(cost, values)) if values else None


def solve_search(formulation: _C.Formulation) -> float | None:
    found, optimal, _, objective = formulation.search(_C.Goal.STEP_SECONDS, 30.0)
    assert optimal
    return objective if found else None


def check_solvers_agree(seed: int) -> None:
    profile, options, rng = small_instance(seed)
    formulation = _C.formulate(profile, budgets_between(profile, options, rng), options)
    expected = brute_force(formulation, profile)
    for solve in (solve_search, solve_glpk, solve_highs):
        found = solve(formulation)
        assert (found is None) == (expected is None), (solve.__name__, found, expected)
        if expected is not None:
            assert found == pytest.approx(expected, abs=1e-6, rel=1e-6), solve.__name__


@pytest.mark.parametrize("seed", range(25))
def test_glpk_search_and_highs_equal_brute_force(seed: int) -> None:
    check_solvers_agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_glpk_search_and_highs_equal_brute_force_on_300_instances(seed: int) -> None:
    check_solvers_agree(seed)


@pytest.mark.parametrize("seed", range(40))
def test_step_time_is_the_formula(seed: int) -> None:
    profile, options, rng = small_instance(seed)
    formulation = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)
    for point in rng.sample(all_counts(profile), k=min(40, len(all_counts(profile)))):
        values = formulation.evaluate(as_counts(point))
        expected = formula_seconds(profile, point, window=options.window, gated=options.gated)
        assert values[formulation.step] * formulation.time_scale == pytest.approx(
            expected, rel=1e-9
        )


@pytest.mark.parametrize("seed", range(40))
def test_device_row_is_never_below_the_walk_over_the_units(seed: int) -> None:
    profile, options, rng = small_instance(seed)
    options.max_simulations = 1  # keep the counts as they are
    formulation = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)
    for point in rng.sample(all_counts(profile), k=min(40, len(all_counts(profile)))):
        plan = _C.decode_plan(profile, as_counts(point), options.window, spread=rng.random() < 0.5)
        values = formulation.evaluate(as_counts(point))
        walked = walk_peak(profile, plan)
        row = values[formulation.device] * formulation.device_scale
        assert row >= walked * (1 - 1e-12)
        assert _C.device_peak_bytes(profile, plan) == walked
        assert values[formulation.host] * formulation.host_scale == pytest.approx(
            _C.host_bytes(profile, plan), rel=1e-12
        )


def test_device_row_is_within_two_leaving_gradients_of_the_walk() -> None:
    """The row takes two as leaving at the end of a run too, where none are yet."""
    profile = random_profile(random.Random(3), max_segments=1, max_count=1)
    unit = profile.units[0]
    unit.checkpoint_bytes = unit.activation_bytes // 10
    unit.can_recompute = unit.can_offload_parameters = True
    profile.units = [unit] * 9
    profile.gradients_persist = True
    formulation = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions())
    for point in [(0, 0, 0), (3, 2, 5), (9, 9, 9), (8, 0, 3), (9, 0, 0)]:
        counts = as_counts([point])
        plan = _C.decode_plan(profile, counts, 2, spread=False)
        row = formulation.evaluate(counts)[formulation.device] * formulation.device_scale
        walked = walk_peak(profile, plan)
        assert walked * (1 - 1e-12) <= row <= walked + 2 * unit.grad_bytes + 1, point
        if point[2] == 0:
            assert row == pytest.approx(walked, rel=1e-12), point
