"""What users' loops do beyond the plain one: each case against DDP or the same split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loops import Setup, hash_of, part, train_ddp, train_rank
from models import batch, make_gpt
from oracle import adamw, forced_plan
from ranks import run
from test_data_parallel import assert_equal_across_ranks, assert_same_bits
from torch import nn

from autohete import AutoHeteWrapper


def wrapped(model: nn.Module, optimizer: Any, **options: Any) -> AutoHeteWrapper:
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **options}
    if "plan" not in keywords:
        keywords["plan"] = forced_plan(model, "all+c")
    return AutoHeteWrapper(model, optimizer, **keywords).to("cpu")


# ------------------------------------------------------------------- one pair of ranks, many loops

QUICK = {
    "tied": Setup(steps=3, tied=True, clip=0.5),
    "longer on one rank": Setup(kind=None, steps=5, grows=True, wrap={"gpu_mem": "700KiB"}),
}
MORE = {
    "ragged": Setup(steps=4, ragged=True, micro_batches=2),
    "every backward exchanged": Setup(steps=4, micro_batches=2, no_sync=False),
    "planned": Setup(kind=None, steps=6, micro_batches=2, clip=0.5, wrap={"gpu_mem": "800KiB"}),
    "bf16": Setup(steps=3, bf16=True),
}


def both_ways(rank: int, size: int, setups: dict[str, Setup]) -> dict[str, Any]:
    return {
        name: (train_rank(rank, size, setup), train_ddp(rank, size, setup))
        for name, setup in setups.items()
    }


@pytest.mark.parametrize("setups", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)])
def test_loops_of_two_ranks_give_the_bits_of_ddp(setups):
    """Tied weights, lengths that differ by rank, accumulation, a plan of rank 0's, bf16."""
    for pair in zip(*(r.items() for r in run(2, both_ways, setups, timeout=100)), strict=True):
        assert_equal_across_ranks([ours for _, (ours, _) in pair])
        for name, (ours, ddp) in pair:
            print(name)
            assert_same_bits(ours, ddp)
            assert ours.extra["plan"] == pair[0][1][0].extra["plan"]
            assert ours.extra["replans"] == (1 if setups[name].grows else 0)


# ------------------------------------------------------------------- gradients that differ by rank


class Branches(nn.Module):
    """One layer is used on even ranks only, one on none; a weight is used outside of its unit."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.rank % 2 == 0:
            x = self.layers[1](x)
        x = self.layers[3](x)
        return (x @ self.layers[3].weight + x @ self.layers[0].weight.t()).sum()


def branches(rank: int, size: int) -> tuple[list[Any], list[Any]]:
    """Averaged gradients after one backward, and what the ranks' own ones average to."""
    torch.manual_seed(0)
    plain = Branches(rank)
    torch.manual_seed(0)
    ours = Branches(rank)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    plain(x).backward()
    trained = wrapped(ours, adamw(ours))
    trained(x).backward()
    got = [None if p.grad is None else p.grad.clone() for p in trained.parameters()]
    trained.unwrap()
    return got, [p.grad for p in plain.parameters()]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_layer_only_some_ranks_use_is_averaged_with_zeros_and_an_unused_one_has_no_gradient(size):
    ranks = run(size, branches)
    for i, averaged in enumerate(ranks[0][0]):
        own = [r[1][i] for r in ranks]
        for got, _ in ranks:
            assert (got[i] is None) == all(g is None for g in own)
            if averaged is not None:
                assert torch.equal(got[i], averaged)
        if averaged is None:
            continue
        mean = sum(torch.zeros_like(averaged) if g is None else g / size for g in own)
        torch.testing.assert_close(averaged, mean)


# ------------------------------------------------------------------- non-finite, own collectives


def scaled(rank: int, size: int) -> tuple[list[str], list[float]]:
    """GradScaler; in step 2 one rank alone sees an infinity."""
    model = make_gpt(layers=2, dropout=0.0)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    hashes, scales = [], []
    for step in range(4):
        loss = trained(*part(Setup(), step, 0, rank))
        if step == 2 and rank == size - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hashes.append(hash_of(list(model.parameters())))
        scales.append(scaler.get_scale())
    trained.unwrap()
    return hashes, scales


def test_an_infinity_on_one_rank_skips_the_step_on_all():
    ranks = run(2, scaled)
    assert ranks[0] == ranks[1]
    hashes, scales = ranks[0]
    assert hashes[1] == hashes[2] and hashes[2] != hashes[3] and hashes[0] != hashes[1]
    assert scales == [256.0, 256.0, 128.0, 128.0]


def forgotten(rank: int, size: int) -> str:
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer)
    with trained.no_sync():
        trained(*batch(rank)).backward()
    with pytest.raises(ValueError, match="under no_sync") as caught:
        optimizer.step()
    optimizer.zero_grad()
    trained(*batch(rank)).backward()
    optimizer.step()  # goes on
    trained.unwrap()
    return str(caught.value)


def test_a_step_on_gradients_of_one_rank_alone_is_refused():
    assert all("no_sync" in text for text in run(2, forgotten))


def alone_in_a_group(rank: int, size: int) -> list[str]:
    """process_group=False trains each rank by itself; a group of its own counts only its ranks."""
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else []
    hashes = []
    for group in (False, *([pairs[rank // 2]] if pairs else [])):
        model = make_gpt(layers=2, dropout=0.0)
        optimizer = adamw(model)
        trained = wrapped(model, optimizer, process_group=group)
        for step in range(2):
            trained(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(hash_of(list(model.parameters())))
        trained.unwrap()
    return hashes


@pytest.mark.slow
def test_a_group_of_some_ranks_trains_by_itself():
    alone, paired = zip(*run(4, alone_in_a_group), strict=True)
    assert len(set(alone)) == 4
    assert paired[0] == paired[1] != paired[2] == paired[3]


# ------------------------------------------------------------------- one rank by itself


def first_alone(rank: int, size: int) -> int:
    """Evaluates, reads and saves weights on the first rank only, between steps."""
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer)
    for step in range(3):
        trained(*part(Setup(), step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                trained.eval()(*batch(step))
            trained.train()
            torch.save(trained.state_dict(), f"{step}.pt")
            sum(p.norm() for p in trained.parameters())
    trained.unwrap()
    return 3


@pytest.mark.slow
def test_one_rank_may_evaluate_and_save_weights_while_the_others_wait_for_nobody():
    assert run(2, first_alone) == [3, 3]
