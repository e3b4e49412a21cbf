"""Profiles by input size: never below what was or would be measured, and known only where safe."""

from __future__ import annotations

import random

import pytest
import torch

from autohete import _C
from autohete.planning import ActivationRule, Tier, device_peak_bytes
from autohete.recompute_rules import rules_for
from autohete.sized_profiles import SizedProfiles, bucket_of, covers, size_of, upper_of


def bytes_at(tokens: int) -> int:
    return 100 + 30 * tokens + tokens * tokens // 4


def profile_at(tokens: int, layers: int = 4) -> _C.Profile:
    unit = _C.UnitProfile()
    unit.name = unit.kind = "layer"
    unit.num_parameters, unit.param_bytes, unit.grad_bytes = 10, 40, 40
    unit.state_bytes = 80
    unit.activation_bytes = bytes_at(tokens)
    unit.checkpoint_bytes = 4 * tokens
    unit.temporary_bytes = 3 * tokens
    unit.forward_seconds = tokens / 100
    profile = _C.Profile()
    profile.units = [unit] * layers
    profile.fixed_device_bytes = tokens
    profile.gradients_persist = False
    for name in ("h2d_bytes_per_second", "d2h_bytes_per_second", "cpu_params_per_second",
                 "device_params_per_second"):  # fmt: skip
        setattr(profile.hardware, name, 1.0)
    return profile


def sized(*measured: int) -> SizedProfiles:
    known = SizedProfiles()
    for tokens in measured:
        known.add((tokens, tokens), profile_at(tokens))
    return known


def test_sizes_are_those_of_the_tensors_the_model_is_called_with() -> None:
    inputs = (torch.zeros(2, 7),), {"mask": torch.ones(2, 7, 3), "scale": torch.tensor(1.0), "n": 3}
    assert size_of(inputs) == (14, 7, 42, 7)
    assert size_of(((), {"text": "words"})) == ()


def test_a_size_covers_what_is_no_larger_in_anything() -> None:
    assert covers((8, 4), (8, 4)) and covers((8, 4), (3, 1))
    assert not covers((8, 4), (3, 5))
    assert not covers((8, 4), (8, 4, 1)), "other tensors"


@pytest.mark.parametrize("seed", range(20))
def test_between_two_measured_sizes_nothing_is_taken_for_less_than_it_is(seed: int) -> None:
    chance = random.Random(seed)
    measured = sorted(chance.sample(range(16, 2048), 4))
    known = sized(*measured)
    for tokens in range(16, measured[-1] + 1, 7):
        profile = known.at((tokens, tokens))
        assert profile is not None
        assert profile.units[0].activation_bytes >= bytes_at(tokens)
        assert profile.units[0].temporary_bytes >= 3 * tokens
        assert profile.fixed_device_bytes >= tokens
    assert known.at((measured[-1] + 1, 1)) is None


def test_a_measured_size_is_what_was_measured() -> None:
    known = sized(100, 300)
    for tokens in (100, 300):
        profile = known.at((tokens, tokens))
        assert profile is not None
        assert profile.units[0].activation_bytes == bytes_at(tokens)


def test_beyond_the_largest_guesses_lie_on_either_side() -> None:
    known = sized(200)
    low, high = (known.beyond((500, 500), power) for power in (1, 2))
    assert low is not None and high is not None
    actual = bytes_at(500)
    assert low.units[0].activation_bytes <= actual <= high.units[0].activation_bytes
    assert low.units[0].temporary_bytes <= 3 * 500 <= high.units[0].temporary_bytes


def test_what_no_inputs_exceed_is_the_larger_of_each() -> None:
    one, other = profile_at(10), profile_at(20)
    units = one.units
    units[2].temporary_bytes = 10**6
    one.units = units
    upper = upper_of(one, other)
    assert upper.units[2].temporary_bytes == 10**6
    assert upper.units[1].temporary_bytes == 60
    assert upper.units[2].activation_bytes == bytes_at(20)


def test_buckets_hold_their_sizes_and_are_few() -> None:
    sizes = [(n, n) for n in range(1, 5000)]
    buckets = {bucket_of(size) for size in sizes}
    assert all(covers(bucket_of(size), size) for size in sizes)
    assert len(buckets) < 60


@pytest.mark.parametrize("seed", range(10))
def test_the_fewest_of_the_plans_recomputed_units_that_fit_are_recomputed(seed: int) -> None:
    chance = random.Random(seed)
    profile = profile_at(chance.randint(10, 300), layers=6)
    plan = _C.Plan()
    units = [_C.UnitPlan() for _ in range(6)]
    for unit in units[: chance.randint(1, 6)]:
        unit.activations = ActivationRule.RECOMPUTE
    for unit in units[3:]:
        unit.parameters = unit.gradients = unit.optimizer_state = Tier.HOST
    plan.units = units

    def peak(recomputed: int) -> int:
        other = _C.Plan(plan)
        changed = [_C.UnitPlan(u) for u in units]
        for index, unit in enumerate(changed):
            again = index < recomputed
            unit.activations = ActivationRule.RECOMPUTE if again else ActivationRule.KEEP
        other.units = changed
        return device_peak_bytes(profile, other)

    most = sum(u.activations == ActivationRule.RECOMPUTE for u in units)
    budget = chance.randint(min(map(peak, range(most + 1))), peak(0))
    rules = rules_for(profile, plan, budget)
    expected = next(n for n in range(most + 1) if peak(n) <= budget or n == most)
    assert rules == [ActivationRule.RECOMPUTE] * expected + [ActivationRule.KEEP] * (6 - expected)
