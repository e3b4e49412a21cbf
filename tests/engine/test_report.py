"""What report() says of the lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import make_gpt
from oracle import adamw, forced_plan, plain_loop

from autohete import AutoHeteWrapper
from autohete.planning import UnitPlan

SHARES = ("compute_share", "h2d_share", "d2h_share", "cpu_share")


def report_of(steps, update_rate=None):
    model = make_gpt()
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="1GiB", plan=forced_plan(model, "all"), profile_path=None
    )
    wrapped.to("cpu")
    if update_rate is not None:
        wrapped.run.engine.set_update_rate(update_rate)
    for step in range(steps):
        plain_loop(wrapped, optimizer, step)
    report = wrapped.report()
    wrapped.unwrap()
    return report


def test_shares_are_not_known_before_two_steps():
    report = report_of(1)
    assert all(getattr(report, name) is None for name in SHARES)
    assert "lanes busy" not in str(report)


def test_every_lane_has_its_share_of_the_time():
    report = report_of(6)
    for name in SHARES:
        assert 0 < getattr(report, name) <= 1
    assert "lanes busy       compute" in str(report)
    assert report.metrics()["autohete/cpu_share"] == report.cpu_share


def test_a_slow_cpu_lane_is_the_busy_one_and_the_device_waits():
    parameters = sum(p.numel() for p in make_gpt().parameters())
    report = report_of(5, update_rate=parameters / 2.0)  # two seconds for an update of all
    assert report.cpu_share > 0.7
    assert report.compute_share < 0.5
    assert report.cpu_share > max(report.h2d_share, report.d2h_share)


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (1.0, 1.4, None),
        (1.4, 1.0, None),
        (1.0, 3.0, "steps took 3.0 times as long as predicted"),
        (2.0, 1.0, "steps took 0.50 of the time predicted"),
        (None, 1.0, None),
    ],
)
def test_a_prediction_that_is_far_off_is_said_with_what_it_usually_means(
    predicted, measured, words
):
    report = replace(report_of(2), step_seconds_predicted=predicted, step_seconds_measured=measured)
    lines = [line for line in str(report).splitlines() if "predicted:" in line]
    assert bool(lines) == (words is not None)
    if words:
        assert words in lines[0] and "usually" in lines[0]


def test_the_plan_before_the_first_step_is_the_one_that_step_runs_under():
    model = make_gpt()
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(model, optimizer, gpu_mem="64MiB", profile_path=None)
    assert wrapped.plan is None, "on no device yet"
    wrapped.to("cpu")
    first = wrapped.plan
    assert first is wrapped.plan
    assert first.strategy == "safest"
    placed = [UnitPlan(unit) for unit in wrapped.run.plans.placements]
    assert first.units == placed
    assert "host" in str(first)
    assert "the first step is measured under it" in str(first)
    assert "0 B" not in str(first) + first._repr_html_(), "what is not predicted"
    assert "not planned yet" in str(wrapped.report())
    for step in range(2):
        plain_loop(wrapped, optimizer, step)
    assert wrapped.plan.strategy == "autohete"
    assert wrapped.plan is wrapped.plan is not first
    assert "measured under it" not in str(wrapped.plan)
    wrapped.unwrap()
    assert wrapped.plan is None


def test_a_plan_that_is_given_is_the_plan_from_the_start():
    model = make_gpt()
    plan = forced_plan(model, "state")
    wrapped = AutoHeteWrapper(
        model, adamw(model), gpu_mem="64MiB", plan=plan, profile_path=None
    ).to("cpu")
    assert wrapped.plan is plan
    wrapped.unwrap()
