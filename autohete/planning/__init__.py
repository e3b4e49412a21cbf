"""Planning: what is measured, what is decided, what is predicted. Nothing here needs a device."""

import torch  # noqa: F401  (its libraries must be loaded before our module)

from autohete._C import (
    ActivationRule,
    Budgets,
    HardwareProfile,
    InfeasibleError,
    Plan,
    Profile,
    Tier,
    UnitPlan,
    UnitProfile,
    device_peak_bytes,
    host_bytes,
    lane_seconds,
)
from autohete.planning.make_plan import make_plan, minimum_gpu_mem
from autohete.planning.profile_file import load_profile, save_profile
from autohete.planning.simulate import simulate, write_trace
from autohete.planning.sizes import format_bytes, parse_bytes
from autohete.planning.strategies import STRATEGIES
from autohete.planning.table import PlanRow, format_plan, plan_rows

__all__ = [
    "STRATEGIES", "ActivationRule", "Budgets", "HardwareProfile", "InfeasibleError", "Plan",
    "PlanRow", "Profile", "Tier", "UnitPlan", "UnitProfile", "device_peak_bytes", "format_bytes",
    "format_plan", "host_bytes", "lane_seconds", "load_profile", "make_plan", "minimum_gpu_mem",
    "parse_bytes", "plan_rows", "save_profile", "simulate", "write_trace",
]

Plan.__str__ = format_plan
Plan.__repr__ = lambda plan: f"<Plan of {len(plan.units)} units, strategy {plan.strategy}>"
