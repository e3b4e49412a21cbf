"""How well the formulation predicts the simulator, and how far plans are from the best known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autohete import _C
from autohete.planning.solve import solve
from tests.plan.reference import as_counts
from tests.plan.settings import random_gpt, random_point

UNLIMITED = 2**53
NUM_PLANS = 600


def errors(gated: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of the formula over random plans, and which plans are hard.

    Hard: the device computes for less than 98 % of the simulated step.
    """
    rng = random.Random(seed)
    found, hard = [], []
    policy = _C.SimulationPolicy()
    policy.gated, policy.steps = gated, 8
    for _ in range(NUM_PLANS):
        profile = random_gpt(rng)
        counts = as_counts(random_point(profile, rng))
        formulation = _C.formulate(
            profile, _C.Budgets(UNLIMITED, UNLIMITED), _C.PlannerOptions(gated=gated)
        )
        formula = formulation.evaluate(counts)[formulation.step] * formulation.time_scale
        simulated = min(
            (
                _C.simulate(profile, _C.decode_plan(profile, counts, 2, spread=spread), policy)
                for spread in (False, True)
            ),
            key=lambda simulation: simulation.step_seconds,
        )
        found.append(abs(formula / simulated.step_seconds - 1))
        hard.append(simulated.compute_seconds < 0.98 * simulated.step_seconds)
    return np.array(found), np.array(hard)


def show(title: str, values: np.ndarray) -> tuple[float, float]:
    mean, p95 = float(values.mean()), float(np.quantile(values, 0.95))
    print(f"{title}: {len(values)} plans, mean {mean:.2%}, p95 {p95:.2%}, max {values.max():.2%}")
    return mean, p95


@pytest.mark.slow
def test_the_formula_predicts_the_simulator_on_random_plans() -> None:
    found, hard = errors(gated=False, seed=11)
    mean, p95 = show("ungated, all", found)
    assert mean <= 0.01
    assert p95 <= 0.04
    mean, p95 = show("ungated, hard", found[hard])
    assert mean <= 0.015
    assert p95 <= 0.05


@pytest.mark.slow
def test_the_gated_formula_predicts_the_gated_simulator_on_hard_plans() -> None:
    found, hard = errors(gated=True, seed=12)
    show("gated, all", found)
    _, p95 = show("gated, hard", found[hard])
    assert p95 <= 0.03


def best_known(
    profile: _C.Profile, budgets: _C.Budgets, plan: _C.Plan, gated: bool, rng: random.Random
) -> float:
    """The shortest step found by climbing from many random starts, far past make_plan()'s limit."""
    options = _C.PlannerOptions(gated=gated, max_simulations=400)
    formulation = _C.formulate(profile, budgets, options)
    best = plan.step_seconds
    for _ in range(8):
        start = as_counts(random_point(profile, rng))
        climbed = _C.finish_plan(profile, formulation, start, options, "climbed")
        if (
            climbed.device_peak_bytes <= budgets.device_bytes
            and climbed.host_bytes <= budgets.host_bytes
        ):
            best = min(best, climbed.step_seconds)
    return best


@pytest.mark.slow
def test_plans_are_within_a_thousandth_of_the_best_known() -> None:
    rng = random.Random(21)
    regrets = []
    while len(regrets) < 60:
        profile, gated = random_gpt(rng), rng.random() < 0.5
        options = _C.PlannerOptions(gated=gated)
        least = _C.minimum_device_bytes(profile, UNLIMITED, options)
        whole = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)
        nothing = whole.evaluate([_C.SegmentCounts()] * 3)[whole.device] * whole.device_scale
        device = int(least + rng.uniform(0.02, 0.9) * (nothing - least))
        budgets = _C.Budgets(device, UNLIMITED)
        plan = solve(profile, budgets, options)
        regrets.append(plan.step_seconds / best_known(profile, budgets, plan, gated, rng) - 1)
    mean, _ = show("regret", np.array(regrets))
    assert mean <= 0.001
    assert max(regrets) <= 0.015
