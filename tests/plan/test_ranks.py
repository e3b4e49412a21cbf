"""Several ranks in simulator and planner: schedules worked out by hand, and lower bounds."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from autohete import _C
from autohete.planning import make_plan
from tests.plan.reference import as_counts, layers, make_profile, random_profile
from tests.plan.settings import random_gpt, random_point
from tests.plan.test_simulator import FAST, exactly, plan_of, policy, random_case

UNLIMITED = 2**53


def ranks_of(num_ranks: int = 2, **fields: float) -> _C.RankProfile:
    """Everything takes no time unless a rate is given."""
    ranks = _C.RankProfile()
    ranks.num_ranks = num_ranks
    rates = ("exchange", "gather", "device_gather", "pack")
    for field, value in {**{f"{rate}_bytes_per_second": FAST for rate in rates}, **fields}.items():
        setattr(ranks, field, value)
    return ranks


def among(ranks: _C.RankProfile, num_layers: int = 3, **fields: float) -> _C.Profile:
    """Layers of 8 parameters and 4 bytes of gradients, links that take no time."""
    units = layers(
        num_layers,
        **{
            "num_parameters": 8,
            "param_bytes": 4,
            "grad_bytes": 4,
            "forward_seconds": 1.0,
            "backward_seconds": 1.0,
            **fields,
        },
    )
    profile = make_profile(
        units, h2d_bytes_per_second=FAST, d2h_bytes_per_second=FAST, device_params_per_second=FAST
    )
    profile.ranks = ranks
    return profile


def step(profile: _C.Profile, plan: _C.Plan, **fields: object) -> float:
    return _C.simulate(profile, plan, policy(**fields)).step_seconds


# ------------------------------------------------------------------- worked out by hand


def test_exchanges_longer_than_backward_pace_it_one_at_a_time() -> None:
    profile = among(ranks_of(exchange_bytes_per_second=4 / 5))
    # 3 forwards, the last unit's backward, then three exchanges of 5 one after the other.
    assert step(profile, plan_of(profile)) == exactly(3 + 1 + 3 * 5)


def test_short_exchanges_hide_behind_backward_all_but_the_last() -> None:
    profile = among(ranks_of(exchange_bytes_per_second=4.0), backward_seconds=2.0)
    assert step(profile, plan_of(profile)) == exactly(3 + 3 * 2 + 1)


def test_an_exchange_takes_its_latency_too() -> None:
    profile = among(ranks_of(exchange_bytes_per_second=4.0, exchange_latency_seconds=4.0))
    assert step(profile, plan_of(profile)) == exactly(3 + 1 + 3 * 5)


def test_laying_out_and_taking_up_gradients_is_work_of_the_device() -> None:
    profile = among(ranks_of(pack_bytes_per_second=8.0))
    assert step(profile, plan_of(profile)) == exactly(3 + 3 + 3 * 2 * 0.5)


def test_a_rank_updates_its_rows_then_all_are_gathered() -> None:
    profile = among(
        ranks_of(4, exchange_bytes_per_second=4.0, gather_bytes_per_second=4 / 3), num_layers=1
    )
    # forward, backward, exchange, a quarter of 8 parameters, gather
    assert step(profile, plan_of(profile, state={0})) == exactly(1 + 1 + 1 + 2 + 3)


def test_of_own_gradients_a_rank_s_rows_leave_the_device() -> None:
    ranks = ranks_of(4)
    times = []
    for ranks.own_gradients in (False, True):
        profile = among(ranks, num_layers=1)
        profile.hardware.d2h_bytes_per_second = 1.0
        times.append(step(profile, plan_of(profile, state={0})))
    # forward, backward, 4 bytes or 1 down, a quarter of 8 parameters
    assert times == [exactly(1 + 1 + 4 + 2), exactly(1 + 1 + 1 + 2)]


def test_rows_updated_on_the_device_are_gathered_there_before_the_next_forward() -> None:
    profile = among(ranks_of(device_gather_bytes_per_second=2.0))
    assert step(profile, plan_of(profile)) == exactly(3 + 3 + 3 * 2)


@pytest.mark.parametrize("gated", [True, False])
def test_gathers_follow_the_step_smallest_unit_first(gated: bool) -> None:
    profile = among(ranks_of(gather_bytes_per_second=8.0))
    simulation = _C.simulate(profile, plan_of(profile, state={0, 1, 2}), policy(gated=gated), True)
    gathers = [s for s in simulation.spans if s.what == "gather"]
    assert [s.unit for s in gathers] == [i % 3 for i in range(len(gathers))]
    ends = [s.end_seconds for s in simulation.spans if s.what == "backward" and s.unit == 0]
    for step_index, end in enumerate(ends[:-1]):
        assert gathers[3 * step_index].start_seconds >= end


def test_early_gathers_follow_their_updates() -> None:
    seconds, first = {}, {}
    for early in (False, True):
        profile = among(ranks_of(gather_bytes_per_second=2.0, early_gathers=early), num_layers=6)
        hardware = profile.hardware
        hardware.cpu_params_per_second = FAST
        profile.hardware = hardware
        plan = plan_of(profile, state=set(range(6)))
        simulation = _C.simulate(profile, plan, policy(gated=False, early_uploads=True), True)
        seconds[early] = simulation.step_seconds
        gather = next(s for s in simulation.spans if s.what == "gather")
        backward = next(s for s in simulation.spans if s.what == "backward" and s.unit == 0)
        first[early] = (gather.unit, gather.start_seconds < backward.end_seconds)
    assert first == {False: (0, False), True: (5, True)}
    assert seconds[True] < seconds[False]


def test_only_the_last_backward_of_a_step_exchanges() -> None:
    profile = among(ranks_of(exchange_bytes_per_second=4.0))
    profile.gradient_accumulation_steps = 3
    simulation = _C.simulate(profile, plan_of(profile), policy(), True)
    exchanges = sum(s.what == "exchange" for s in simulation.spans)
    backwards = sum(s.what == "backward" for s in simulation.spans)
    assert backwards == 3 * exchanges
    assert simulation.step_seconds == exactly(3 * 6 + 1)


def test_what_shares_cores_with_a_collective_slows_down() -> None:
    ranks = ranks_of(
        exchange_bytes_per_second=2.0,
        compute_share_during_collective=0.5,
        collective_share_during_compute=0.5,
    )
    profile = among(ranks, num_layers=2)
    # Backward of unit 0 takes 2 beside half of the exchange of unit 1, whose rest takes 1.
    assert step(profile, plan_of(profile)) == exactly(2 + 1 + 2 + 1 + 2)


# ------------------------------------------------------------------- at random


def random_ranks(rng: random.Random, scale: float, **more: Any) -> _C.RankProfile:
    """Rates within two powers of ten of `scale`."""

    def rate() -> float:
        return scale * 10 ** rng.uniform(-1, 1)

    return ranks_of(
        rng.choice([2, 3, 8, 64]),
        exchange_bytes_per_second=rate(),
        gather_bytes_per_second=rate(),
        device_gather_bytes_per_second=rate(),
        exchange_latency_seconds=rng.choice([0.0, 1e-4]),
        gather_latency_seconds=rng.choice([0.0, 1e-4]),
        pack_bytes_per_second=100 * scale,
        **more,
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_a_lane_is_busy(seed: int) -> None:
    profile, plan, order = random_case(seed)
    profile.ranks = random_ranks(random.Random(seed), 1e7, early_gathers=seed % 2 == 1)
    simulation = _C.simulate(profile, plan, order, True)
    lanes = _C.lane_seconds(profile, plan)
    for lane in ("compute", "cpu", "d2h", "exchange", "gather"):
        assert simulation.step_seconds >= lanes[lane] * (1 - 1e-9) - 1e-12, lane
    for lane in _C.SimulatedLane.__members__.values():
        spans = [s for s in simulation.spans if s.lane == lane]
        for before, after in itertools.pairwise(spans):
            assert before.end_seconds <= after.start_seconds + 1e-12
    for k, placed in enumerate(plan.units):
        uses = [s for s in simulation.spans if s.unit == k]
        forwards = [s for s in uses if s.what == "forward"]
        gathers = [s for s in uses if s.what == "gather"]
        if placed.optimizer_state != _C.Tier.HOST or profile.units[k].grad_bytes == 0:
            assert not gathers
            continue
        for i, gather in enumerate(gathers):
            after = (i + 1) * profile.gradient_accumulation_steps
            if after < len(forwards):
                assert forwards[after].start_seconds >= gather.end_seconds - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_of_one_rank_no_rate_among_ranks_counts(seed: int) -> None:
    profile, plan, order = random_case(seed)
    alone = _C.simulate(profile, plan, order).step_seconds
    profile.ranks = ranks_of(1, exchange_bytes_per_second=1.0)
    assert _C.simulate(profile, plan, order).step_seconds == alone


def errors(gated: bool, early: bool, seed: int, num_plans: int) -> np.ndarray:
    """Of the formula against the simulator, relative."""
    rng = random.Random(seed)
    order = policy(gated=gated, steps=8)
    found = []
    for _ in range(num_plans):
        profile = random_gpt(rng)
        scale = 10 ** rng.uniform(9, 10.5)
        profile.ranks = random_ranks(rng, scale, early_gathers=early)
        counts = as_counts(random_point(profile, rng))
        options = _C.PlannerOptions(gated=gated)
        formulation = _C.formulate(profile, _C.Budgets(UNLIMITED, UNLIMITED), options)
        formula = formulation.evaluate(counts)[formulation.step] * formulation.time_scale
        simulated = min(
            _C.simulate(
                profile, _C.decode_plan(profile, counts, 2, spread=spread), order
            ).step_seconds
            for spread in (False, True)
        )
        found.append(abs(formula / simulated - 1))
    return np.array(found)


@pytest.mark.parametrize(("gated", "early"), [(True, False), (False, False), (False, True)])
def test_the_formula_predicts_the_simulator(gated: bool, early: bool) -> None:
    found = errors(gated, early, seed=3, num_plans=150)
    mean, p95 = float(found.mean()), float(np.quantile(found, 0.95))
    print(f"gated {gated}, early {early}: mean {mean:.2%}, p95 {p95:.2%}, max {found.max():.2%}")
    assert mean <= 0.02
    assert p95 <= 0.08


# ------------------------------------------------------------------- plans


def placement(plan: _C.Plan) -> list[tuple[object, object, object]]:
    return [(u.parameters, u.optimizer_state, u.activations) for u in plan.units]


def test_the_plan_changes_with_the_link() -> None:
    """Recomputing is free while backward waits for a slow link, and leaves room for state."""
    profile = random_gpt(random.Random(5))
    least = _C.minimum_device_bytes(profile, UNLIMITED, _C.PlannerOptions())
    plans = {}
    for rate in (3e11, 3e8):
        profile.ranks = ranks_of(
            2,
            exchange_bytes_per_second=rate,
            gather_bytes_per_second=rate,
            device_gather_bytes_per_second=rate,
        )
        plans[rate] = make_plan(profile, 2 * least)
    fast, slow = plans.values()
    assert placement(fast) != placement(slow)
    assert slow.binding_lane in ("exchange", "gather")
    assert fast.binding_lane not in ("exchange", "gather")
    # Each is the better one on its own link.
    for rate, own, other in ((3e11, fast, slow), (3e8, slow, fast)):
        profile.ranks = ranks_of(
            2,
            exchange_bytes_per_second=rate,
            gather_bytes_per_second=rate,
            device_gather_bytes_per_second=rate,
        )
        gated = policy(gated=True)
        mine = _C.simulate(profile, own, gated).step_seconds
        others = step(profile, other, gated=True)
        print(f"{rate:.0e} bytes/s: own {mine:.3f} s, the other's {others:.3f} s")
        assert mine < others


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_ranks", 0),
        ("exchange_bytes_per_second", 0.0),
        ("gather_bytes_per_second", float("nan")),
        ("pack_bytes_per_second", -1.0),
        ("gather_latency_seconds", -1.0),
        ("compute_share_during_collective", 0.0),
        ("collective_share_during_other", 1.5),
    ],
)
def test_rates_that_cannot_be_are_refused_by_name(field: str, value: float) -> None:
    profile = random_profile(random.Random(0))
    profile.ranks = ranks_of(**{"num_ranks": 2, field: value})
    with pytest.raises(ValueError, match=f"profile.ranks: {field} is"):
        _C.validate_profile(profile)
