"""whole_gradients=False: each rank averages the gradients of the rows that it updates only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loops import Setup, part, train_rank
from models import make_gpt
from oracle import adamw
from ranks import run
from test_data_parallel import assert_equal_across_ranks, assert_same_bits
from test_sharded_state import Small, wrapped

OWN = {"whole_gradients": False}

SETUPS = {
    "offloaded": Setup(kind="all+c", steps=5),
    "on the device": Setup(kind="device", steps=3),
    "tied, ragged, accumulated": Setup(kind="state", micro_batches=2, tied=True, ragged=True),
    "planned": Setup(kind=None, steps=5),
    "half": Setup(kind="all", steps=4, bf16=True),
    "in place": Setup(kind="all+c", steps=5, wrap={"early_updates": "in_place"}),
}
QUICK = ("offloaded", "tied, ragged, accumulated")


def both(rank: int, size: int, setup: Setup) -> tuple[Any, Any]:
    own = replace(setup, wrap={**setup.wrap, **OWN})
    return train_rank(rank, size, own), train_rank(rank, size, setup)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SETUPS]
)
def test_two_ranks_train_to_the_bits_of_whole_gradients(name: str):
    ranks = run(2, both, SETUPS[name])
    assert_equal_across_ranks([own for own, _ in ranks])
    for own, whole in ranks:
        assert_same_bits(own, whole)
        sent, of_all = (r.extra["counters"]["d2h_bytes"] for r in (own, whole))
        if name == "offloaded":  # only own rows leave the device
            print(f"to the host: {sent} bytes of {of_all}")
            assert sent == pytest.approx(of_all / 2, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_are_equal_among_each_other_and_close_to_whole_gradients(size: int):
    ranks = run(size, both, Setup(steps=4))
    assert_equal_across_ranks([own for own, _ in ranks])
    own, whole = ranks[0]
    torch.testing.assert_close(own.losses, whole.losses, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_the_norm_is_over_all_rows_of_all_ranks_and_counts_a_tied_weight_once():
    setup = Setup(steps=4, tied=True, wrap={"max_grad_norm": 0.1})
    for own, whole in run(2, both, setup):
        torch.testing.assert_close(own.losses, whole.losses, rtol=1e-5, atol=0)
        for a, b in zip(own.moments, whole.moments, strict=True):
            torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-3, atol=1e-7)


def small(rank: int, size: int, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained = wrapped(model, optimizer, "state", **options)
    for step in range(4):
        trained(torch.full((3,), 0.5 + step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.unwrap()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_parameters_smaller_than_the_group_are_right(size: int):
    own, whole = run(size, small, OWN), run(size, small, {})
    for rank in range(size):
        for a, first, b in zip(own[rank], own[0], whole[rank], strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a, b)


def looked_at(rank: int, size: int) -> dict[str, Any]:
    """Gradients after a backward, and what follows a second one without no_sync()."""
    gradients: dict[bool, list[torch.Tensor]] = {}
    for whole in (True, False):
        model = make_gpt(layers=2, dropout=0.0)
        optimizer = adamw(model)
        trained = wrapped(model, optimizer, whole_gradients=whole)
        trained(*part(Setup(), 0, 0, rank)).backward()
        gradients[whole] = [p.grad.detach().clone() for p in model.parameters()]
        if whole:
            trained.unwrap()
    with pytest.raises(ValueError, match="expected one exchange a step") as caught:
        trained(*part(Setup(), 1, 0, rank)).backward()
    return {"gradients": gradients, "refusal": str(caught.value)}


def test_other_rows_are_nan_and_adding_to_averaged_gradients_is_refused():
    for rank, seen in enumerate(run(2, looked_at)):
        assert "no_sync()" in seen["refusal"]
        for whole, own in zip(*seen["gradients"].values(), strict=True):
            n = -(-len(whole) // 2)
            mine = slice(rank * n, (rank + 1) * n)
            assert torch.equal(own[mine], whole[mine])
            others = torch.ones(len(whole), dtype=torch.bool)
            others[mine] = False
            assert own[others].isnan().all()


def refused(rank: int, size: int) -> list[str]:
    model = make_gpt(layers=2)
    with pytest.raises(ValueError, match="whole_gradients is False") as sgd:
        wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1), **OWN)
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer, **OWN)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(trained(*part(Setup(), 0, 0, rank))).backward()
    with pytest.raises(ValueError, match="GradScaler") as scaled:
        scaler.step(optimizer)
    return [str(sgd.value), str(scaled.value)]


@pytest.mark.slow
def test_what_reads_whole_gradients_is_refused():
    assert all(len(messages) == 2 for messages in run(2, refused))
