"""Strategies side by side."""

from __future__ import annotations

import json

from autohete import planning
from autohete.planning.compare import compare_ablations, results_to_dict
from autohete.planning.simulate import ABLATIONS
from tests.planning.test_make_plan import gpt


def test_every_strategy_has_a_line_and_those_that_do_not_fit_say_what_they_need() -> None:
    profile = gpt()
    budget = int(planning.minimum_gpu_mem(profile) * 1.2)
    results = planning.compare_strategies(profile, budget, "2GiB")
    assert [result.strategy for result in results] == list(planning.STRATEGIES)
    assert results[0].plan is not None
    device_only = next(r for r in results if r.strategy == "device_only")
    assert device_only.plan is None
    assert device_only.smallest_gpu_mem > budget
    planning.make_plan(profile, device_only.smallest_gpu_mem, strategy="device_only")
    text = planning.format_comparison(results)
    assert len(text.splitlines()) == 1 + len(results)
    assert "does not fit; it needs" in text


def test_no_ablation_is_faster_and_each_has_a_line() -> None:
    profile = gpt()
    budget = int(planning.minimum_gpu_mem(profile) * 1.2)
    plan = planning.make_plan(profile, budget)
    results = compare_ablations(profile, budget)
    assert [result.strategy.split()[-1] for result in results] == list(ABLATIONS)
    for result in results:
        assert result.plan is not None
        assert result.plan.step_seconds >= plan.step_seconds * (1 - 1e-9)
    assert any(r.plan is not None and r.plan.step_seconds > plan.step_seconds for r in results)
    json.dumps(results_to_dict(results))


def test_ablations_of_what_does_not_fit_are_none() -> None:
    assert compare_ablations(gpt(), 1) == []
