"""A plan as people read it."""

from __future__ import annotations

import pytest

from autohete import planning
from tests.planning.test_make_plan import gpt


def test_rows_cover_every_unit_once_and_never_mix_kinds_or_placements() -> None:
    profile = gpt()
    plan = planning.make_plan(profile, int(planning.minimum_gpu_mem(profile) * 1.5))
    rows = planning.plan_rows(plan, profile)
    assert [i for row in rows for i in range(row.first, row.last + 1)] == list(range(14))
    for row in rows:
        for i in range(row.first, row.last + 1):
            assert (plan.units[i].parameters == planning.Tier.HOST) == (row.parameters == "host")
            assert profile.units[i].kind == profile.units[row.first].kind


def test_text_names_runs_and_predictions() -> None:
    profile = gpt()
    plan = planning.make_plan(profile, "100GiB")
    text = planning.format_plan(plan, profile)
    assert "block.0 .. block.11" in text
    assert "kept" in text
    assert f"{plan.step_seconds * 1e3:.1f} ms" in text
    assert str(plan).count("\n") == text.count("\n") - 2  # without a profile one row says it all


def test_a_plan_for_another_model_is_refused() -> None:
    plan = planning.make_plan(gpt(12), "100GiB")
    with pytest.raises(ValueError, match="14 units, expected 10"):
        planning.plan_rows(plan, gpt(8))
