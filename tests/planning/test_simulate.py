"""simulate() and its trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autohete import planning
from tests.planning.test_make_plan import gpt


def test_giving_up_the_priorities_or_the_overlap_is_never_faster() -> None:
    profile = gpt()
    plan = planning.make_plan(profile, int(planning.minimum_gpu_mem(profile) * 1.2))
    whole = planning.simulate(profile, plan).step_seconds
    assert whole == pytest.approx(plan.step_seconds, rel=1e-12)
    assert planning.simulate(profile, plan, without=("fifo",)).step_seconds >= whole * (1 - 1e-9)
    assert planning.simulate(profile, plan, without=("barrier",)).step_seconds >= whole * (1 - 1e-9)
    with pytest.raises(ValueError, match="without is"):
        planning.simulate(profile, plan, without=("order",))


def test_what_is_no_profile_or_no_plan_is_named() -> None:
    with pytest.raises(ValueError, match="plan is a NoneType, expected a Plan"):
        planning.simulate(gpt(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="profile is a tuple, expected a Profile"):
        planning.simulate((gpt(), None), None)  # type: ignore[arg-type]


def test_the_trace_is_a_chrome_trace_with_every_span(tmp_path: Path) -> None:
    profile = gpt()
    plan = planning.make_plan(profile, int(planning.minimum_gpu_mem(profile) * 1.2))
    simulation = planning.simulate(profile, plan)
    planning.write_trace(tmp_path / "trace.json", profile, simulation)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(simulation.spans) > 0
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "device compute",
        "host to device",
        "device to host",
        "CPU updates",
    }
