"""The rows behind the pictures say what the plan, the simulation and the trace say."""

from __future__ import annotations

import random

import pytest

from autohete.planning import device_peak_bytes, device_visits, make_plan, simulate
from autohete.planning.plan_report import PlanReport
from autohete.report import rows, style
from autohete.report.rows import Span
from autohete.run_report import RunReport


def test_the_strip_has_every_unit_and_kind_where_the_plan_puts_it(planned: PlanReport) -> None:
    strip = rows.placement_rows(planned.plan, planned.profile)
    assert len(strip) == 4 * len(planned.plan.units)
    by_key = {(row["unit"], row["bytes of"]): row for row in strip}
    for i, unit in enumerate(planned.plan.units):
        assert by_key[i, "parameters"]["where"] == str(unit.parameters.name).lower()
        assert by_key[i, "parameters"]["name"] == planned.profile.units[i].name
        recomputed = unit.activations.name == "RECOMPUTE"
        assert (by_key[i, "activations"]["where"] == "recomputed") == recomputed


def test_the_memory_curve_peaks_where_the_plan_says(planned: PlanReport) -> None:
    simulation = simulate(planned.profile, planned.plan)
    curve = rows.predicted_memory(planned.profile, planned.plan, simulation)
    assert max(row["bytes"] for row in curve) == planned.plan.device_peak_bytes
    assert [row["ms"] for row in curve] == sorted(row["ms"] for row in curve)


def test_the_walk_over_visits_peaks_at_the_peak_of_any_plan(planned: PlanReport) -> None:
    rng = random.Random(0)
    for _ in range(20):
        budget = rng.randint(2500, 8000) << 20
        plan = make_plan(planned.profile, budget, strategy="autohete")
        visits = device_visits(planned.profile, plan)
        assert max(v[2] for v in visits) == device_peak_bytes(planned.profile, plan)
        count = len(plan.units)
        assert [v[0] for v in visits] == [*range(count), *reversed(range(count))]


def test_two_steps_begin_and_end_with_a_forward_of_the_first_unit() -> None:
    spans = [Span(0, u, "forward", 10 * s + u, 10 * s + u + 1) for s in range(4) for u in range(3)]
    assert rows.step_starts(spans) == [0, 10, 20, 30]
    assert rows.last_steps(spans) == (10, 30)
    assert rows.last_steps(spans, passes=2) == (0, 20)
    assert rows.last_steps(spans[:3]) == (0, 3)


def test_work_is_cut_at_the_borders_of_the_window() -> None:
    spans = [Span(1, 0, "upload", 0.5, 1.5), Span(1, 1, "upload", 3.0, 4.0)]
    (row,) = rows.timeline_rows(spans, ["a", "b"], "measured", (1.0, 2.0))
    assert (row["begin"], row["end"], row["units"]) == (0.0, 500.0, "a")


def test_joining_keeps_lanes_kinds_and_the_time_that_was_busy() -> None:
    spans = [Span(3, u, "update", u, u + 0.9999) for u in range(5)]
    spans += [Span(0, 0, "forward", 1.0, 2.0), Span(3, 9, "update", 50.0, 51.0)]
    out = rows.joined(spans, gap=0.01)
    assert [(s.lane, s.begin, s.end) for s in sorted(out, key=lambda s: s.begin)] == [
        (3, 0, 4.9999),
        (0, 1.0, 2.0),
        (3, 50.0, 51.0),
    ]
    (row, *_) = rows.timeline_rows(out, [f"h.{i}" for i in range(10)], "measured", (0, 60))
    assert row["units"] == "h.0 .. h.4"


def test_a_model_of_a_thousand_spans_is_drawn_with_fewer(planned: PlanReport) -> None:
    spans = [Span(3, i % 100, "update", i * 1e-3, (i + 1) * 1e-3) for i in range(5000)]
    assert len(rows.timeline_rows(spans, [], "predicted", (0.0, 5.0))) < 600


def test_a_trace_holds_every_lane_and_its_compute_is_inside_the_steps(traced: RunReport) -> None:
    details = traced.details
    assert details is not None
    lanes = {span[0] for span in details.spans}
    assert lanes == {0, 1, 2, 3}
    names = {span[2] for span in details.spans if span[0] == 0}
    assert {"forward", "backward", "recompute"} <= names
    forwards = [s for s in details.spans if s[2] == "forward"]
    assert len(forwards) % len(details.unit_names) == 0
    spans = [Span(*span[:5]) for span in details.spans]
    drawn = rows.timeline_rows(spans, details.unit_names, "measured", (0, 1e12))
    assert {row["work"] for row in drawn} <= set(style.WORK), "every kind of work has a colour"
    for span in spans:
        assert span.begin <= span.end


@pytest.mark.parametrize("host", [False, True])
def test_measured_memory_stays_below_the_measured_peak(traced: RunReport, host: bool) -> None:
    details = traced.details
    assert details is not None
    window = (details.samples[0][0], details.samples[-1][0])
    curve = rows.measured_memory(details.samples, window, host)
    peak = traced.host_peak_measured_bytes if host else traced.device_peak_measured_bytes
    assert peak is not None
    assert 0 < max(row["bytes"] for row in curve) <= peak
