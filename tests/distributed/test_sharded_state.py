"""Each rank has its rows of the optimizer state, shown as DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Setup, part, train_ddp, train_rank
from models import make_gpt
from oracle import adamw, forced_plan
from ranks import run
from test_data_parallel import assert_equal_across_ranks, assert_same_bits
from torch import nn

from autohete import AutoHeteWrapper


def wrapped(model: nn.Module, optimizer: Any, kind: str = "all+c", **options: Any) -> Any:
    keywords = {"gpu_mem": "512MiB", "cpu_mem": "1GiB", "profile_path": None, **options}
    return AutoHeteWrapper(model, optimizer, plan=forced_plan(model, kind), **keywords).to("cpu")


def state_bytes(rank: int, size: int) -> tuple[int, int]:
    model = make_gpt(layers=3, width=96, vocab=960)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer)
    trained(*part(Setup(), 0, 0, rank)).backward()
    optimizer.step()
    engine, machine = trained.run.engine, trained.run.side.machine
    sizes = sum(engine.state_bytes(i) for i in range(len(trained.run.units)))
    return sizes, machine.host_used()


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_the_optimizer_state_of_a_rank_falls_as_one_over_the_ranks(size):
    whole, host = run(1, state_bytes)[0]
    for part_bytes, host_of_rank in run(size, state_bytes):
        print(f"{size} ranks: {part_bytes} of {whole} bytes, host memory {host_of_rank} of {host}")
        assert part_bytes == pytest.approx(whole / size, rel=0.03)
        assert host - host_of_rank == pytest.approx(whole * (1 - 1 / size), rel=0.03)


class Small(nn.Module):
    """Dimensions below, at and above the number of ranks; a 0-dim one; one stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1,), (2, 3), (3,), (5, 2), (7, 1, 2), ())
        self.all = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in sizes])
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.turned.sum() * x).sum()
        for i, p in enumerate(self.all):
            total = total + ((p * (i + 1)).tanh() * x.mean()).sum()
        return total


def small(rank: int, size: int, ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Small()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    if ours:
        trained = wrapped(model, optimizer, "state")
    else:
        from autohete import CPUAdamW

        optimizer = CPUAdamW(model.parameters(), lr=0.1, amsgrad=True)
        trained = nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        trained(torch.full((3,), 0.5 + step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ours:
        trained.unwrap()
    state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_parameters_smaller_than_the_group_are_updated_to_the_bit(size):
    ours, ddp = run(size, small, True), run(size, small, False)
    for rank in range(size):
        for a, b, c in zip(ours[rank], ours[0], ddp[rank], strict=True):
            assert torch.equal(a, b)
            if size == 2:  # of more, DDP sums in another order
                assert torch.equal(a, c)
            torch.testing.assert_close(a, c)


def read_at_once(rank: int, size: int) -> list[bool]:
    """Whether what is read right after step() is what stands there once all is at rest."""
    model = make_gpt(layers=3, width=128, vocab=2000)
    optimizer = adamw(model)
    trained = wrapped(model, optimizer, num_workers=1)
    same = []
    readers = (
        lambda t: t.full_tensor(),
        lambda t: t.to_local(),
        lambda t: t._local_tensor,
        lambda t: t.norm().full_tensor(),
        lambda t: (t * 2).full_tensor(),
        lambda t: torch.stack([t, t]).full_tensor(),
    )
    # Twice: DTensor knows the second time what to do, and goes past Python.
    for step, read in enumerate(readers * 2):
        trained(*part(Setup(), step, 0, rank)).backward()
        trained.run.engine.set_update_rate(4e6)  # slow: whoever does not wait is too early
        optimizer.step()
        state = optimizer.state[model.tokens.weight]["exp_avg"]
        at_once = read(state).clone()
        trained.synchronize()
        same.append(torch.equal(at_once, read(state)))
        optimizer.zero_grad()
    return same


def test_moments_read_right_after_a_step_are_the_newest():
    for same in run(2, read_at_once):
        assert all(same), same


def states_given(rank: int, size: int) -> list[bool]:
    """A whole state that a user loads, and a part, are taken up; the run goes on from them."""
    outcomes = []
    for whole in (True, False):
        first = make_gpt(layers=2, dropout=0.0)
        optimizer = adamw(first)
        trained = wrapped(first, optimizer)
        for step in range(2):
            trained(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model_state = {k: v.clone() for k, v in trained.state_dict().items()}
        state = optimizer.state_dict()
        if whole:
            for entry in state["state"].values():
                for key, value in entry.items():
                    entry[key] = value.full_tensor() if hasattr(value, "full_tensor") else value
        second = make_gpt(seed=5, layers=2, dropout=0.0)
        other = adamw(second)
        again = wrapped(second, other)
        again.load_state_dict(model_state)
        other.load_state_dict(state)
        for model, opt in ((trained, optimizer), (again, other)):
            model(*part(Setup(), 2, 0, rank)).backward()
            opt.step()
        trained.unwrap()
        again.unwrap()
        outcomes += [
            torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)
        ]
        outcomes += [
            torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])
            for p, q in zip(first.parameters(), second.parameters(), strict=True)
        ]
    return outcomes


@pytest.mark.slow
def test_a_loaded_state_is_taken_up_whole_or_in_parts():
    assert all(all(outcome) for outcome in run(2, states_given))


def early(rank: int, size: int) -> dict[str, Any]:
    setup = Setup(steps=8, clip=1e6)
    return {"ours": train_rank(rank, size, setup), "ddp": train_ddp(rank, size, setup)}


@pytest.mark.slow
def test_parts_are_updated_ahead_of_step_to_the_bit():
    ranks = run(2, early)
    assert_equal_across_ranks([r["ours"] for r in ranks])
    assert_same_bits(ranks[0]["ours"], ranks[0]["ddp"])
    assert ranks[0]["ours"].extra["counters"]["updates_ahead"] > 0
