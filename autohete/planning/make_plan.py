"""make_plan(): from a profile and two budgets to a plan."""

from __future__ import annotations

from autohete import _C
from autohete.planning.sizes import parse_bytes
from autohete.planning.solve import solve
from autohete.planning.strategies import STRATEGIES, plan_strategy

Size = int | float | str
_UNLIMITED = 2**53
_LARGEST_WINDOW = 1024


def make_plan(
    profile: _C.Profile,
    gpu_mem: Size,
    cpu_mem: Size | None = None,
    strategy: str = "autohete",
    solver: str = "auto",
    *,
    window: int = 2,
    gated: bool = True,
    early_uploads: bool = False,
    seconds: float = 10.0,
) -> _C.Plan:
    """Decide, unit by unit, what leaves the device.

    Args:
        profile: what is measured or estimated of the model and the machine.
        gpu_mem: device memory to keep within, in bytes or as "24GiB".
        cpu_mem: host memory likewise; None for no limit.
        strategy: one of `STRATEGIES`.
        solver: "auto", "glpk" or "enumeration" (exact, built in); for the strategy "autohete".
        window: device slots for parameters that live on the host.
        gated: the updates start at step(), after the whole backward (gradient clipping needs it).
        early_uploads: where not gated, what was updated goes back to the device at once; this
            engine waits for step(), the paper's system does not.
        seconds: time limit of the solve.

    Raises:
        InfeasibleError: nothing fits; it carries the smallest sizes that would.
        ValueError: an argument or a field of the profile is out of range.
    """
    require_profile("make_plan", profile)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    _check_window(window)
    budgets = _C.Budgets(
        parse_bytes(gpu_mem, "gpu_mem"),
        _UNLIMITED if cpu_mem is None else parse_bytes(cpu_mem, "cpu_mem"),
    )
    options = _C.PlannerOptions(window=window, gated=gated, early_uploads=early_uploads)
    _C.validate_profile(profile)
    if strategy == "autohete":
        return solve(profile, budgets, options, solver=solver, seconds=seconds)
    return plan_strategy(strategy, profile, budgets, options)


def minimum_gpu_mem(profile: _C.Profile, cpu_mem: Size | None = None, *, window: int = 2) -> int:
    """Return the smallest `gpu_mem` in bytes for which make_plan() finds a plan; 0 for none."""
    require_profile("minimum_gpu_mem", profile)
    _check_window(window)
    host = _UNLIMITED if cpu_mem is None else parse_bytes(cpu_mem, "cpu_mem")
    return _C.minimum_device_bytes(profile, host, _C.PlannerOptions(window=window))


def require_profile(where: str, profile: object) -> None:
    """Raise a ValueError for what is no Profile, such as the pair that load_profile() returns."""
    if not isinstance(profile, _C.Profile):
        raise ValueError(
            f"{where}: profile is a {type(profile).__name__}, expected a Profile; load_profile() "
            "returns one and its plan"
        )


def _check_window(window: object) -> None:
    if type(window) is not int or not 1 <= window <= _LARGEST_WINDOW:
        raise ValueError(
            f"window is {window!r}, expected a whole number from 1 to {_LARGEST_WINDOW}"
        )
