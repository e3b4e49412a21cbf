"""Tables say what the plan and the report say."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from autohete.planning import ActivationRule, Plan, Profile, Tier, UnitPlan, UnitProfile
from autohete.report.tables import plan_table, report_facts


def text_of(table: object) -> str:
    out = io.StringIO()
    Console(width=100, file=out).print(table)
    return out.getvalue()


def unit_plan(activations: ActivationRule, parameters: Tier, optimizer: Tier) -> UnitPlan:
    unit = UnitPlan()
    unit.activations, unit.parameters, unit.optimizer_state = activations, parameters, optimizer
    unit.gradients = optimizer
    return unit


def unit_profile(name: str, kind: str) -> UnitProfile:
    unit = UnitProfile()
    unit.name, unit.kind, unit.num_parameters = name, kind, 1
    return unit


def test_layers_with_one_placement_share_a_row() -> None:
    plan, profile = Plan(), Profile()
    kept = unit_plan(ActivationRule.KEEP, Tier.DEVICE, Tier.DEVICE)
    moved = unit_plan(ActivationRule.RECOMPUTE, Tier.HOST, Tier.HOST)
    plan.units = [kept, kept, moved, moved, moved]
    profile.units = [unit_profile(f"h.{i}", "block") for i in range(5)]
    lines = text_of(plan_table(plan, profile)).splitlines()
    rows = [line.split() for line in lines if "h." in line]
    assert rows == [
        ["h.0", "..", "h.1", "2", "kept", "device", "device"],
        ["h.2", "..", "h.4", "3", "recomputed", "host", "host"],
    ]


def test_bytes_are_per_step_and_unpredicted_figures_are_left_out() -> None:
    report = SimpleNamespace(
        num_steps=4,
        device_budget_bytes=2**30,
        device_peak_predicted_bytes=None,
        device_peak_measured_bytes=2**29,
        step_seconds_predicted=0.25,
        step_seconds_measured=0.5,
        h2d_bytes=4 * 2**20,
        d2h_bytes=8 * 2**20,
    )
    facts = dict(report_facts(report))
    assert facts["host to device, per step"] == "1.00 MiB"
    assert facts["device to host, per step"] == "2.00 MiB"
    assert facts["step time: predicted"] == "250 ms"
    assert "device memory: predicted peak" not in facts
    assert facts["device memory: measured peak"] == "512 MiB"
