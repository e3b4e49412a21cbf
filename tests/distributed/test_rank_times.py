"""What steps that ran show of collectives and of other ranks, and what a run takes from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Setup, hash_of, part
from models import make_gpt
from oracle import adamw
from ranks import run

from autohete import _C, AutoHeteWrapper, run_plan
from autohete.planning import InfeasibleError
from autohete.planning.profile_file import profile_from_dict, profile_to_dict
from autohete.rank_plans import merged_profile
from autohete.rank_times import ExchangeTimes, SeenStep, refine
from autohete.warm_steps import WarmSteps

MIB = 1 << 20


class Work:
    """A collective: a future that the test completes."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_exchange_takes_from_when_it_was_sent_or_the_one_before_arrived():
    clock = Clock()
    times = ExchangeTimes(clock)
    works = [Work() for _ in range(4)]
    for at, unit, parts in ((0, 7, works[:2]), (1, 6, works[2:3]), (9, 5, works[3:])):
        clock.now = at
        times.sent(unit, parts)
    for at, work in ((2, works[1]), (4, works[0]), (6, works[2])):
        clock.now = at
        work.future.set_result(None)
    for at in (8, 8, 12):  # waited for later than they arrived, but for the last
        clock.now = at
        times.landed()
    assert times.seconds() == [(7, 4), (6, 2), (5, 3)]


def test_what_is_on_its_way_at_the_end_does_not_count():
    times = ExchangeTimes(Clock())
    times.sent(3, [Work()])
    assert times.seconds() == []


def test_a_backend_without_futures_is_timed_by_its_waits():
    class Plain:
        def get_future(self) -> Any:
            raise NotImplementedError("Work::getFuture not implemented.")

    clock = Clock()
    times = ExchangeTimes(clock)
    times.sent(2, [Plain()])
    clock.now = 5
    times.landed()
    assert times.seconds() == [(2, 5)]


def profile_and_plan() -> tuple[_C.Profile, _C.Plan]:
    """Two layers of 8 MiB on two ranks: an exchange takes 1 s and one at half the rate 2."""
    profile = _C.Profile()
    units = []
    for name in ("one", "two"):
        unit = _C.UnitProfile()
        unit.name, unit.kind = name, "layer"
        unit.num_parameters = 2 * MIB
        unit.param_bytes = unit.grad_bytes = 8 * MIB
        unit.state_bytes = 16 * MIB
        unit.forward_seconds, unit.backward_seconds = 1.0, 2.0
        units.append(unit)
    profile.units = units
    hardware = profile.hardware
    for name in ("h2d_bytes", "d2h_bytes", "cpu_params", "device_params"):
        setattr(hardware, f"{name}_per_second", 1e17)
    profile.hardware = hardware
    ranks = profile.ranks
    ranks.num_ranks = 2
    for name in ("exchange", "gather", "device_gather"):
        setattr(ranks, f"{name}_bytes_per_second", 8.0 * MIB)
    ranks.pack_bytes_per_second = 1e17
    profile.ranks = ranks
    plan = _C.Plan()
    placed = []
    for _ in units:
        unit = _C.UnitPlan()
        unit.gradients = unit.optimizer_state = _C.Tier.HOST
        placed.append(unit)
    plan.units = placed
    return profile, plan


def test_collectives_take_what_ranks_saw_in_the_mean():
    profile, plan = profile_and_plan()
    one = {n: SeenStep([3.0], 5.0, [(1, 1.0), (0, 3.0)]) for n in (4, 5, 6)}
    other = {n: SeenStep([3.0], 3.0, [(1, 3.0), (0, 1.0)]) for n in (5, 6, 7)}
    refine(profile, plan, [one, other], rates=True)
    assert profile.ranks.exchange_bytes_per_second == pytest.approx(4 * MIB)  # 2 s, not 1
    assert profile.ranks.gather_bytes_per_second == pytest.approx(4 * MIB)  # 4 s of both
    assert profile.units[0].backward_seconds == 2.0


def test_a_rate_stays_one_that_a_profile_may_have():
    profile, plan = profile_and_plan()
    seen_by_both = {n: SeenStep([3.0], 1e-30, [(1, 1e-30), (0, 1e-30)]) for n in range(3)}
    refine(profile, plan, [seen_by_both, seen_by_both], rates=True)
    _C.validate_profile(profile)
    assert profile.ranks.exchange_bytes_per_second > 8 * MIB


def test_compute_takes_what_the_slowest_takes_between_two_meetings():
    profile, plan = profile_and_plan()
    profile.outside_seconds, profile.loop_seconds = 3.0, 4.0
    one = {n: SeenStep([1.0, 2.0, 7.0], None, []) for n in range(3)}
    other = {n: SeenStep([3.0, 1.0, 6.0], None, []) for n in range(3)}
    refine(profile, plan, [one, other], rates=True)  # 3 + 2 + 7 where each takes 10
    assert profile.units[1].forward_seconds == pytest.approx(1.2)
    assert profile.units[1].backward_seconds == pytest.approx(2.4)
    assert profile.outside_seconds == pytest.approx(3.6)
    assert profile.loop_seconds == pytest.approx(4.8)
    assert profile.ranks.exchange_bytes_per_second == 8 * MIB


def test_steps_of_one_rank_only_change_nothing():
    profile, plan = profile_and_plan()
    before = profile_to_dict(profile)
    one, later = SeenStep([9.0], 9.0, [(1, 9.0)]), SeenStep([1.0], 1.0, [])
    refine(profile, plan, [{1: one}, {}], rates=True)
    refine(profile, plan, [{1: one}, {2: later}], rates=True)
    assert profile_to_dict(profile) == before


class TwoRanks:
    """Another rank's profile beside this one's."""

    def __init__(self, other: _C.Profile) -> None:
        self.other = other

    def gather(self, mine: Any) -> list[Any]:
        return [mine, profile_to_dict(self.other)]


def test_seconds_are_of_one_rank_and_bytes_of_all():
    """The longest of each would be a step of 2 x (1 + 5) + 2 that no rank takes."""
    one, _ = profile_and_plan()
    other = profile_from_dict(profile_to_dict(one))
    one.outside_seconds = 2.0
    units = other.units
    for unit in units:
        unit.forward_seconds, unit.backward_seconds = 0.5, 5.0
        unit.activation_bytes = 64
    other.units = units
    merged = merged_profile(TwoRanks(other), one)  # type: ignore[arg-type]
    assert [(u.forward_seconds, u.backward_seconds) for u in merged.units] == [(0.5, 5.0)] * 2
    assert merged.outside_seconds == 0.0
    merged = merged_profile(TwoRanks(one), other)  # type: ignore[arg-type]
    assert merged.outside_seconds == 0.0
    assert merged.units[0].activation_bytes == 64


# ------------------------------------------------------------------- in a run

TOO_SLOW = 1e4  # bytes per second


def trained(rank: int, size: int, stated: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ranks' rates of a first step, timed wrongly, and those after steps were timed."""
    times = run_plan.measured_rates

    def slow(*args: Any) -> _C.RankProfile:
        rates = times(*args)
        rates.exchange_bytes_per_second = rates.gather_bytes_per_second = TOO_SLOW
        return rates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "measured_rates", slow)
        model = make_gpt(layers=3, width=64, dropout=0.0)
        optimizer = adamw(model)
        ours = AutoHeteWrapper(
            model,
            optimizer,
            gpu_mem="1.8MiB",
            profile_path=None,
            rank_bandwidth=TOO_SLOW if stated else None,
        ).to("cpu")
        out = []
        for step in range(1 + WarmSteps.SETTLING + WarmSteps.NUM + 2):
            ours(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            profile = ours.run.plans.profile
            out.append(profile_to_dict(profile) if profile else None)
        ours.unwrap()
    return out[1], out[-1]


def test_a_run_takes_rates_from_its_steps():
    ranks = run(2, trained, False)
    for name in ("ranks", "units"):
        assert [p[name] for p in ranks[0]] == [p[name] for p in ranks[1]]
    first, later = (profile["ranks"] for profile in ranks[0])
    assert first["exchange_bytes_per_second"] == TOO_SLOW
    for name in ("exchange", "gather"):
        assert later[f"{name}_bytes_per_second"] > 100 * TOO_SLOW


def test_stated_rates_stay():
    first, later = run(2, trained, True)[0]
    for name in ("exchange", "gather"):
        rate = f"{name}_bytes_per_second"
        assert later["ranks"][rate] == first["ranks"][rate]


def length_of(rank: int, step: int) -> int:
    """The second rank's sequences grow, within what the first one's need."""
    return 16 if rank == 0 else 8 if step < 4 else 12


def grown_within(rank: int, size: int) -> list[str]:
    model = make_gpt(dropout=0.0)
    optimizer = adamw(model)
    ours = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", profile_path=None).to("cpu")
    hashes = []
    for step in range(8):
        tokens, targets = part(Setup(), step, 0, rank)
        length = length_of(rank, step)
        ours(tokens[:, :length], targets[:, :length]).backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(hash_of(list(model.parameters())))
    ours.unwrap()
    return hashes


def test_ranks_agree_whether_a_plan_is_in_use_already():
    """One that is measured again recomputes what the others keep; bytes of all stay the same."""
    model = make_gpt(dropout=0.0)
    optimizer = adamw(model)
    plain = []
    for step in range(8):
        for rank in range(2):
            tokens, targets = part(Setup(), step, 0, rank)
            length = length_of(rank, step)
            model(tokens[:, :length], targets[:, :length]).backward()
        for p in model.parameters():
            p.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(hash_of(list(model.parameters())))
    assert run(2, grown_within) == [plain, plain]


def without_overlap(rank: int, size: int) -> list[str]:
    """The strategy that each step ran under, from the second on."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "make_plan", only_without_overlap(run_plan.make_plan))
        model = make_gpt(dropout=0.0)
        optimizer = adamw(model)
        ours = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", profile_path=None).to("cpu")
        for step in range(1 + WarmSteps.SETTLING + WarmSteps.NUM + 2):
            ours(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(ours.run.plans.in_use.strategy)
        ours.unwrap()
    return seen[1:]


def only_without_overlap(make: Any) -> Any:
    """Let there be no plan with the bytes of the device that the first one was asked for."""
    first: list[int] = []

    def made(profile: _C.Profile, *args: Any, **keywords: Any) -> Any:
        first.append(profile.fixed_device_bytes)
        if profile.fixed_device_bytes >= first[0]:
            raise InfeasibleError("no room")
        return make(profile, *args, **keywords)

    return made


def test_an_exchange_without_overlap_leaves_its_room_to_later_plans_too():
    for strategies in run(2, without_overlap):
        assert set(strategies) == {"autohete"}
