"""Collectives timed or stated, and the plan that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Setup, part
from models import make_gpt
from oracle import adamw
from ranks import run

from autohete import AutoHeteWrapper
from autohete.planning import ActivationRule, Tier
from autohete.planning.profile_file import plan_to_dict, profile_to_dict
from autohete.rank_rates import _shares

# ------------------------------------------------------------------- worked out by hand


def test_shares_follow_from_when_compute_and_the_collective_were_over():
    # Both are 1 s alone. Beside each other at half the rate, over together after 2 s.
    assert _shares(1.0, 1.0, 0.0, 2.0, 2.0) == (0.5, 0.5)
    # Compute is not disturbed; the collective gets 0.4 of a second done meanwhile.
    assert _shares(1.0, 1.0, 0.0, 1.0, 1.6) == pytest.approx((1.0, 0.4))
    # The collective is over after 1.25 s, compute at half the rate till then.
    assert _shares(1.0, 1.0, 1.25, 1.625, 1.625) == pytest.approx((0.5, 0.8))


# ------------------------------------------------------------------- in a run


def planned(rank: int, size: int, rates: list[str | None]) -> list[dict[str, Any]]:
    """Train two steps at each rate that is stated, or timed for None."""
    out = []
    for rate in rates:
        model = make_gpt(layers=6, width=64, dropout=0.0)
        optimizer = adamw(model)
        trained = AutoHeteWrapper(
            model,
            optimizer,
            gpu_mem="4.5MiB",
            cpu_mem="64MiB",
            profile_path=None,
            early_updates=False,
            rank_bandwidth=rate,
        ).to("cpu")
        for step in range(2):
            trained(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        profile, plan = trained.run.plans.profile, trained.plan
        assert profile is not None and plan is not None
        out.append(
            {
                "profile": profile_to_dict(profile),
                "plan": plan_to_dict(plan),
                "recomputed": sum(u.activations == ActivationRule.RECOMPUTE for u in plan.units),
                "on host": sum(u.optimizer_state == Tier.HOST for u in plan.units),
            }
        )
        trained.unwrap()
    return out


def test_all_ranks_plan_with_the_same_timed_rates():
    (one,), (other,) = run(2, planned, [None])
    assert one["profile"] == other["profile"]
    assert one["plan"] == other["plan"]
    ranks = one["profile"]["ranks"]
    assert ranks["num_ranks"] == 2
    for name in ("exchange", "gather", "device_gather", "pack"):
        assert ranks[f"{name}_bytes_per_second"] > 0  # how much is the machine's, and its load's
    for name, value in ranks.items():
        if "_share_during_" in name:
            assert 0 < value <= 1


def test_the_plan_of_a_run_changes_with_the_link():
    ranks = run(2, planned, ["100GB", "300kB"])
    fast, slow = ranks[0]
    assert ranks[0] == ranks[1]
    show = {name: (r["recomputed"], r["on host"]) for name, r in (("fast", fast), ("slow", slow))}
    print(f"recomputed, state on host: {show}")
    assert slow["plan"]["binding_lane"] in ("exchange", "gather")
    assert fast["plan"]["binding_lane"] not in ("exchange", "gather")
    assert slow["plan"]["step_seconds"] > 2 * fast["plan"]["step_seconds"]
    assert slow["plan"]["units"] != fast["plan"]["units"]


@pytest.mark.parametrize("rate", [0, "fast", -1])
def test_a_bandwidth_that_cannot_be_is_refused_by_name(rate: Any):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="rank_bandwidth is"):
        AutoHeteWrapper(model, adamw(model), gpu_mem="1MiB", rank_bandwidth=rate)
