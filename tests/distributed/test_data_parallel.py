"""Ranks that train together: equal to the bit among themselves, and DDP's numbers."""

from __future__ import annotations

import pytest
import torch
from loops import Setup, Trained, distance, train_alone, train_ddp, train_joined, train_rank
from ranks import run

KINDS = ("state", "all", "state+c", "all+c", "device+c", "device", None)
HARD = {"micro_batches": 2, "clip": 0.5}


def assert_equal_across_ranks(ranks: list[Trained]) -> None:
    for other in ranks[1:]:
        assert other.hashes == ranks[0].hashes
        assert other.norms == ranks[0].norms


def assert_same_bits(ours: Trained, other: Trained) -> None:
    assert ours.losses == other.losses
    assert ours.norms == other.norms
    assert all(torch.equal(a, b) for a, b in zip(ours.weights, other.weights, strict=True))
    for a, b in zip(ours.moments, other.moments, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def assert_near_the_same_split(ranks: list[Trained], setup: Setup, size: int) -> None:
    """No further from it than twice what another order of summation moves plain PyTorch."""
    alone = train_alone(size, setup)
    control = distance(train_joined(size, setup), alone)
    for key, gap in distance(ranks[0], alone).items():
        print(f"{size} ranks, {setup.kind}, {key}: {gap:.3g}; joined batch {control[key]:.3g}")
        assert gap <= 2 * control[key], key
    micro = setup.micro_batches
    ordered = [
        ranks[rank].losses[step * micro + m]
        for step in range(setup.steps)
        for rank in range(size)
        for m in range(micro)
    ]
    assert ordered == pytest.approx(alone.losses, rel=1e-5)


def test_two_ranks_give_the_bits_of_ddp():
    setup = Setup(steps=6, **HARD)
    ours, ddp = run(2, train_rank, setup), run(2, train_ddp, setup)
    assert_equal_across_ranks(ours)
    for mine, theirs in zip(ours, ddp, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_under_any_plan(size, kind):
    setup = Setup(kind=kind, steps=30, **HARD)
    ranks = run(size, train_rank, setup, timeout=240)
    assert_equal_across_ranks(ranks)
    assert_near_the_same_split(ranks, setup, size)
