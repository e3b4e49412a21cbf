"""How long a plan takes: GLPK alone (bar: 50 ms), the built-in search, and with 60 simulations.

PYTHONPATH=. python benchmarks/planning_speed.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch  # noqa: F401

from autohete import _C
from autohete.planning.solve import load_glpk, solve

UNLIMITED = 2**53


def model(num_layers: int, num_kinds: int) -> _C.Profile:
    """Layers of several kinds, one run each, between an embedding and a head."""
    rng, units = random.Random(num_layers * 10 + num_kinds), []
    for kind in range(num_kinds + 2):
        count = 1 if kind in (0, num_kinds + 1) else num_layers // num_kinds
        parameters = rng.randint(50, 300) * 10**6
        for i in range(count):
            unit = _C.UnitProfile()
            unit.name, unit.kind = f"{kind}.{i}", str(kind)
            unit.num_parameters, unit.state_bytes = parameters, 12 * parameters
            unit.param_bytes = unit.grad_bytes = 2 * parameters
            unit.activation_bytes, unit.checkpoint_bytes = 600 * 10**6, 30 * 10**6
            unit.forward_seconds, unit.backward_seconds = parameters / 1e10, parameters / 5e9
            units.append(unit)
    profile, hardware = _C.Profile(), _C.HardwareProfile()
    hardware.h2d_bytes_per_second = hardware.d2h_bytes_per_second = 25e9
    hardware.cpu_params_per_second, hardware.device_params_per_second = 3e9, 50e9
    profile.units, profile.hardware = units, hardware
    return profile


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    glpk = load_glpk()
    print("layers kinds   GLPK ms  search ms  GLPK + 60 simulations ms  gap")
    for num_layers in (24, 48, 96, 200):
        for num_kinds in (1, 2, 4):
            profile = model(num_layers, num_kinds)
            options = _C.PlannerOptions()
            least = _C.minimum_device_bytes(profile, UNLIMITED, options)
            budgets = _C.Budgets(int(1.7 * least), UNLIMITED)
            formulation = _C.formulate(profile, budgets, options)
            cost, rows = formulation.objective(_C.Goal.STEP_SECONDS), formulation.rows()
            _, values = glpk.solve(cost=cost, seconds=60.0, **rows)
            by_glpk = sum(c * v for c, v in zip(cost, values, strict=True))
            by_search = formulation.search(_C.Goal.STEP_SECONDS, 10.0)
            alone = milliseconds(lambda: glpk.solve(cost=cost, seconds=60.0, **rows))  # noqa: B023
            search = milliseconds(lambda: formulation.search(_C.Goal.STEP_SECONDS, 10.0), 1)  # noqa: B023
            whole = milliseconds(lambda: solve(profile, budgets, options), 3)  # noqa: B023
            print(
                f"{num_layers:6} {num_kinds:5} {alone:9.2f} {search:10.2f} {whole:25.1f}  "
                f"{by_search[3] - by_glpk:.1e}{'' if by_search[1] else ' (search stopped)'}"
            )


if __name__ == "__main__":
    main()
