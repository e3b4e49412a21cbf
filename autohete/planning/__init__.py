"""Planning: what is measured, what is decided, what is predicted. Nothing here needs a device."""

import importlib
from typing import Any

import torch  # noqa: F401  (its libraries must be loaded before our module)

from autohete._C import (
    ActivationRule,
    Budgets,
    HardwareProfile,
    InfeasibleError,
    Plan,
    Profile,
    Simulation,
    Tier,
    UnitPlan,
    UnitProfile,
    device_peak_bytes,
    device_visits,
    host_bytes,
    lane_seconds,
)
from autohete.planning.compare import compare_strategies, format_comparison
from autohete.planning.hardware import available_host_bytes, measure_hardware
from autohete.planning.make_plan import make_plan, minimum_gpu_mem
from autohete.planning.profile_file import load_profile, save_profile
from autohete.planning.simulate import simulate, write_trace
from autohete.planning.sizes import format_bytes, parse_bytes
from autohete.planning.strategies import STRATEGIES
from autohete.planning.table import PlanRow, format_plan, plan_rows, summarise_plan

__all__ = [
    "STRATEGIES",
    "ActivationRule",
    "Budgets",
    "HardwareProfile",
    "InfeasibleError",
    "Plan",
    "PlanRow",
    "Profile",
    "Simulation",
    "Tier",
    "UnitPlan",
    "UnitProfile",
    "available_host_bytes",
    "compare_strategies",
    "describe_model",
    "device_peak_bytes",
    "device_visits",
    "find_machine",
    "format_bytes",
    "format_comparison",
    "format_plan",
    "host_bytes",
    "lane_seconds",
    "load_profile",
    "make_plan",
    "measure_hardware",
    "minimum_gpu_mem",
    "parse_bytes",
    "plan_for",
    "plan_rows",
    "profile_model",
    "save_profile",
    "simulate",
    "summarise_plan",
    "write_trace",
]

# Loaded when first used: they bring in torch's fake tensors, which training does not need.
_LAZY = {
    "describe_model": "model_profile",
    "find_machine": "library",
    "profile_model": "library",
    "plan_for": "plan_report",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"autohete.planning.{_LAZY[name]}")
    return getattr(module, name)


def _describe_plan(plan: Plan) -> str:
    return f"<Plan of {len(plan.units)} units, strategy {plan.strategy}>"


def _plan_html(plan: Plan) -> str:
    from autohete.report.notebook import plan_html

    return plan_html(plan)


def _simulation_html(simulation: Simulation) -> str:
    from autohete.report.notebook import simulation_html

    return simulation_html(simulation)


# setattr: a native class, whose methods a type checker takes as fixed.
setattr(Plan, "__str__", format_plan)  # noqa: B010
setattr(Plan, "__repr__", _describe_plan)  # noqa: B010
setattr(Plan, "_repr_html_", _plan_html)  # noqa: B010
setattr(Simulation, "_repr_html_", _simulation_html)  # noqa: B010
