"""Strategies side by side."""

from __future__ import annotations

from autohete import planning
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
