"""Collectives timed or stated, and the plan that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import Setup, part
from models import make_gpt
from oracle import adamw
from ranks import run

from autohete import AutoHeteWrapper
from autohete.distributed import Ranks
from autohete.exchange_buckets import Bucket
from autohete.planning import ActivationRule, Tier
from autohete.planning.profile_file import plan_to_dict, profile_to_dict
from autohete.rank_rates import measured_rates
from autohete.units import Unit

# ------------------------------------------------------------------- what is timed


def timed(rank: int, size: int) -> tuple[set[str], int, int]:
    """The groups that gathers were timed on, the bytes of all gradients packed, and of the most
    that were packed as one."""
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    names = {id(ranks.parts): "parts", id(ranks.exchange): "exchange"}
    groups: set[str] = set()
    gradients: dict[int, int] = {}  # bytes by address
    together: list[int] = []
    bring, pack = Ranks.bring_parts, Bucket.pack

    def bring_parts(self: Ranks, tensors: Any, group: Any) -> None:
        groups.add(names[id(group)])
        bring(self, tensors, group)

    def packed(self: Bucket, flat: torch.Tensor, num_ranks: int) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        gradients.update((g.data_ptr(), g.nbytes) for g in grads)
        together.append(sum(g.nbytes for g in grads))
        pack(self, flat, num_ranks)

    module = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.LayerNorm(1024))
    unit = Unit("large", [module], list(module.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "bring_parts", bring_parts)
        patch.setattr(Bucket, "pack", packed)
        rates = measured_rates(ranks, torch.device("cpu"), unit, own_rows=False)
    assert rates.pack_bytes_per_second > 0
    return groups, sum(gradients.values()), max(together)


def test_collectives_are_timed_as_a_step_does_them():
    """Over the groups it uses; a unit's tensors at once, and never those that a cache has."""
    for groups, all_bytes, most_at_once in run(2, timed):
        assert groups == {"parts", "exchange"}
        assert most_at_once == (1024 * 1024 + 3 * 1024) * 4
        assert all_bytes > 7 * most_at_once


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
