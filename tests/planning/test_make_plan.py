"""make_plan(): plans fit, what cannot fit says so, and no input ends the interpreter."""

from __future__ import annotations

import math
import random
import signal
import time

import pytest

from autohete import _C, planning
from autohete.planning.solve import load_glpk
from tests.plan.reference import layers, make_profile, random_profile


def gpt(num_layers: int = 12, **fields: object) -> _C.Profile:
    """A small GPT in fp32 on a slow machine, with figures of the right proportions."""
    width, tokens, vocabulary = 256, 2048, 256

    def run(n: int, kind: str, parameters: int, kept: int, flops: float, **more: object):
        return layers(
            n,
            kind,
            num_parameters=parameters,
            param_bytes=4 * parameters,
            grad_bytes=4 * parameters,
            state_bytes=8 * parameters,
            master_bytes=4 * parameters,
            activation_bytes=kept,
            checkpoint_bytes=4 * tokens * width,
            forward_seconds=flops / 50e9,
            backward_seconds=2 * flops / 50e9,
            **more,
        )

    units = run(
        1, "embedding", (vocabulary + 256) * width, 4 * tokens * width, 1e6, can_recompute=False
    )
    units += run(
        num_layers,
        "block",
        12 * width * width,
        72 * tokens * width,
        24.0 * tokens * width * width,
        temporary_bytes=16 * tokens * width,
    )
    units += run(
        1,
        "head",
        vocabulary * width,
        4 * tokens * width,
        2.0 * tokens * width * vocabulary,
        temporary_bytes=8 * tokens * vocabulary,
        can_recompute=False,
    )
    return make_profile(
        units,
        h2d_bytes_per_second=1e9,
        d2h_bytes_per_second=1e9,
        link_latency_seconds=1e-5,
        cpu_params_per_second=1e8,
        device_params_per_second=3e8,
        **fields,
    )


@pytest.mark.parametrize("solver", ["glpk", "enumeration"])
@pytest.mark.parametrize("fraction", [1.0, 1.05, 1.3, 2.0, 4.0])
def test_a_plan_fits_both_budgets(solver: str, fraction: float) -> None:
    profile = gpt()
    budget = math.ceil(planning.minimum_gpu_mem(profile) * fraction)
    plan = planning.make_plan(profile, budget, "1GiB", solver=solver)
    assert plan.device_peak_bytes <= budget
    assert plan.host_bytes <= 2**30
    assert plan.device_peak_bytes <= planning.device_peak_bytes(profile, plan) <= budget


def test_the_smallest_gpu_mem_fits_and_one_percent_less_does_not() -> None:
    profile = gpt()
    least = planning.minimum_gpu_mem(profile)
    planning.make_plan(profile, least)
    with pytest.raises(planning.InfeasibleError):
        planning.make_plan(profile, int(least * 0.99))


def test_with_room_for_all_nothing_leaves_the_device() -> None:
    plan = planning.make_plan(gpt(), "100GiB")
    assert all(unit.optimizer_state == planning.Tier.DEVICE for unit in plan.units)
    assert all(unit.activations == planning.ActivationRule.KEEP for unit in plan.units)


def test_an_impossible_gpu_mem_names_the_smallest_that_would_do() -> None:
    profile = gpt()
    with pytest.raises(planning.InfeasibleError, match="gpu_mem must grow") as error:
        planning.make_plan(profile, "1MB", "1GiB")
    assert isinstance(error.value, ValueError)
    assert error.value.binding == "gpu_mem"
    planning.make_plan(profile, error.value.smallest_gpu_mem, "1GiB")
    assert str(error.value.smallest_gpu_mem) in str(error.value)


def test_an_impossible_pair_names_what_either_would_need() -> None:
    profile = gpt()
    budget = planning.minimum_gpu_mem(profile)
    with pytest.raises(planning.InfeasibleError, match="gpu_mem or cpu_mem") as error:
        planning.make_plan(profile, budget, "1MB")
    planning.make_plan(profile, budget, error.value.smallest_cpu_mem)
    planning.make_plan(profile, error.value.smallest_gpu_mem, "1MB")


def test_a_host_that_cannot_hold_what_is_fixed_binds() -> None:
    with pytest.raises(planning.InfeasibleError) as error:
        planning.make_plan(gpt(fixed_host_bytes=10**9), "100GiB", 10**8)
    assert error.value.binding == "cpu_mem"
    assert error.value.smallest_cpu_mem == 10**9


@pytest.mark.parametrize("strategy", [s for s in planning.STRATEGIES if s != "autohete"])
def test_no_strategy_is_faster_than_autohete_in_its_own_budget(strategy: str) -> None:
    profile = gpt()
    budget = int(planning.minimum_gpu_mem(profile) * 2)
    best = planning.make_plan(profile, budget)
    try:
        other = planning.make_plan(profile, budget, strategy=strategy)
    except planning.InfeasibleError as error:
        assert error.smallest_gpu_mem > budget  # noqa: PT017
        return
    assert other.device_peak_bytes <= budget
    assert best.step_seconds <= other.step_seconds * (1 + 1e-9)


def test_plans_are_deterministic() -> None:
    profile = gpt()
    budget = int(planning.minimum_gpu_mem(profile) * 1.5)
    plans = [planning.make_plan(profile, budget) for _ in range(3)]
    assert all(plan.units == plans[0].units for plan in plans)


@pytest.mark.parametrize("num_layers", [1, 2, 1000])
def test_any_depth_is_planned(num_layers: int) -> None:
    profile = gpt(num_layers)
    least = planning.minimum_gpu_mem(profile)
    assert planning.make_plan(profile, least).device_peak_bytes <= least


def test_no_units_is_an_error() -> None:
    with pytest.raises(ValueError, match="units is empty"):
        planning.make_plan(make_profile([]), "1GiB")


@pytest.mark.parametrize(
    "keyword",
    [
        {"strategy": "magic"},
        {"solver": "magic"},
        {"window": 0},
        {"window": "2"},
        {"window": 2**40},
        {"profile": None},
        {"seconds": 0},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"gpu_mem": "5XB"},
        {"gpu_mem": float("nan")},
        {"cpu_mem": -1},
    ],
)
def test_arguments_out_of_range_are_refused(keyword: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(keyword))):
        planning.make_plan(**{"profile": gpt(), "gpu_mem": "1GiB", **keyword})


POISON = [
    float("nan"),
    float("inf"),
    -1.0,
    -(10**30),
    0,
    1e308,
    10**30,
    2**63,
    1e-308,
    1e-295,
    None,
    "",
]


@pytest.mark.parametrize("seed", range(200))
def test_no_field_whatever_ends_the_interpreter(seed: int) -> None:
    """A poisoned profile is refused or planned; it never gets GLPK to abort."""
    rng = random.Random(seed)
    profile = random_profile(rng)
    units = profile.units
    for _ in range(rng.randint(1, 3)):
        target = rng.choice([profile.hardware, profile, rng.choice(units), rng.choice(units)])
        field = rng.choice([f for f in dir(target) if not f.startswith("_") and f != "units"])
        try:
            setattr(target, field, rng.choice(POISON))
        except (TypeError, OverflowError):
            continue
    profile.units = units
    budget = rng.choice([0, 1, 10**6, 10**9, 2**53])
    try:
        plan = planning.make_plan(
            profile,
            budget,
            rng.choice([0, 10**6, None]),
            solver=rng.choice(["glpk", "enumeration"]),
        )
    except (ValueError, RuntimeError):
        return
    assert plan.device_peak_bytes <= budget


@pytest.mark.parametrize("tiny", [1e-320, 1e-308, 1e-300, 1e-290, 1e-200, 1e-100, 1e-30])
@pytest.mark.parametrize("field", ["cpu_params_per_second", "d2h_bytes_per_second"])
def test_a_rate_next_to_none_is_refused(field: str, tiny: float) -> None:
    profile = gpt()
    hardware = profile.hardware
    setattr(hardware, field, tiny)
    profile.hardware = hardware
    with pytest.raises(ValueError, match=field):
        planning.make_plan(profile, "1GiB", solver="glpk")


@pytest.mark.parametrize("number", [1e-320, 1e-300, 1e-100, 1e100, 1e300, 1.7e308])
def test_glpk_does_not_abort_on_numbers_of_any_size(number: float) -> None:
    for where in ("cost", "upper", "values", "row_lower"):
        for count in (1, 2):  # beside a number of ordinary size too
            problem = {
                "cost": [1.0] * count,
                "upper": [1.0] * count,
                "is_integer": [False] * count,
                "row_starts": [0, count],
                "columns": [*range(count)],
                "values": [1.0] * count,
                "row_lower": [0.5],
            }
            problem[where][0] = number
            status, _ = load_glpk().solve(**problem, seconds=1.0)
            assert status in ("optimal", "infeasible", "none")


def test_glpk_refuses_malformed_problems_instead_of_aborting() -> None:
    glpk = load_glpk()
    good = {
        "cost": [1.0],
        "upper": [1.0],
        "is_integer": [True],
        "row_starts": [0, 1],
        "columns": [0],
        "values": [1.0],
        "row_lower": [0.5],
        "seconds": 1.0,
    }
    assert glpk.solve(**good) == ("optimal", [1.0])
    for bad in (
        {"columns": [1]},
        {"columns": [-1]},
        {"cost": [math.nan]},
        {"cost": []},
        {"values": [math.inf]},
        {"row_starts": [0, 2]},
        {"row_starts": [0]},
        {"row_starts": [1, 0]},
        {"upper": [-1.0]},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"columns": [0, 0], "values": [1.0, 1.0], "row_starts": [0, 2]},
        {"row_lower": [math.nan]},
        {"is_integer": []},
    ):
        with pytest.raises(ValueError, match="glpk"):
            glpk.solve(**{**good, **bad})


def hard_problem() -> dict[str, object]:
    """Market split: branch and bound needs hours for it."""
    rng = random.Random(0)
    columns, rows = 50, 6
    weights = [[rng.randint(0, 99) for _ in range(columns)] for _ in range(rows)]
    starts, indices, values, lower = [0], [], [], []
    for r, row in enumerate(weights):  # |sum w x - half| <= slack, minimise the slacks
        for sign in (1, -1):
            indices += [*range(columns), columns + r]
            values += [*(float(sign * w) for w in row), 1.0]
            starts.append(len(indices))
            lower.append(sign * float(sum(row) // 2))
    return {
        "cost": [0.0] * columns + [1.0] * rows,
        "upper": [1.0] * columns + [1e30] * rows,
        "is_integer": [True] * columns + [False] * rows,
        "row_starts": starts,
        "columns": indices,
        "values": values,
        "row_lower": lower,
    }


def test_a_time_limit_ends_a_solve_with_what_was_found() -> None:
    status, _ = load_glpk().solve(**hard_problem(), seconds=0.2)
    assert status in ("feasible", "none")


def test_control_c_ends_a_solve() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            load_glpk().solve(**hard_problem(), seconds=3600.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - started < 600


def test_micro_batches_without_end_are_refused() -> None:
    """Each is simulated; nothing interrupts a simulation."""
    profile = gpt()
    profile.gradient_accumulation_steps = 10**6
    with pytest.raises(
        ValueError, match=r"accumulation_steps is 1000000, expected 1 \.\. \d+ with"
    ):
        planning.make_plan(profile, "1GiB")


def test_a_share_next_to_none_is_refused() -> None:
    profile = gpt()
    hardware = profile.hardware
    hardware.copy_share_during_cpu = hardware.h2d_share_during_d2h = 5e-324
    profile.hardware = hardware
    with pytest.raises(ValueError, match="h2d_share_during_d2h is 4.94"):
        planning.make_plan(profile, planning.minimum_gpu_mem(gpt()))


def test_without_glpk_the_built_in_search_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    from autohete.planning import solve as solve_module

    profile = gpt()
    budget = int(planning.minimum_gpu_mem(profile) * 1.5)
    with_glpk = planning.make_plan(profile, budget)
    monkeypatch.setattr(solve_module, "load_glpk", lambda: None)
    without = planning.make_plan(profile, budget)
    assert without.solver == "enumeration"
    assert without.step_seconds == pytest.approx(with_glpk.step_seconds, rel=1e-6)
    with pytest.raises(RuntimeError, match="GLPK is missing"):
        planning.make_plan(profile, budget, solver="glpk")
