"""A run is saved on some ranks and goes on on others, on one, or in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import Setup, full, hash_of, part
from models import make_gpt
from oracle import adamw, forced_plan
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autohete import AutoHeteWrapper

LAYERS = 2


def build(seed: int = 0) -> tuple[nn.Module, Any]:
    model = make_gpt(seed=seed, layers=LAYERS, dropout=0.0)
    return model, adamw(model)


def wrapped(model: nn.Module, optimizer: Any) -> AutoHeteWrapper:
    keywords: dict[str, Any] = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}
    plan = forced_plan(model, {i: ("all+c", "device", "state")[i % 3] for i in range(9)})
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")


def step(model: nn.Module, optimizer: Any, number: int, rank: int) -> None:
    model(*part(Setup(), number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def hashed(model: nn.Module, optimizer: Any) -> str:
    states = [full(v) for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return hash_of([*model.parameters(), *states])


def save(rank: int, size: int, folder: str) -> tuple[str, str]:
    """Train, save both ways; the hash then, and one step of the first rank's data later."""
    model, optimizer = build()
    trained = wrapped(model, optimizer)
    for number in range(2):
        step(trained, optimizer, number, rank)
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=f"{folder}/dcp")
    trained.save_checkpoint(f"{folder}/whole.pt", number=2)
    saved = hashed(model, optimizer)
    step(trained, optimizer, 2, 0)
    return saved, hashed(model, optimizer)


def resume(rank: int, size: int, folder: str, how: str, ours: bool = True) -> tuple[str, str]:
    model, optimizer = build(seed=3)
    trained: nn.Module = wrapped(model, optimizer) if ours else model
    step(trained, optimizer, 50, 0)
    if how == "dcp":
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/dcp", no_dist=size == 1)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    elif ours:
        assert trained.load_checkpoint(f"{folder}/whole.pt") == {"number": 2}
    else:
        content = torch.load(f"{folder}/whole.pt", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    saved = hashed(model, optimizer)
    step(trained, optimizer, 2, 0)
    return saved, hashed(model, optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> tuple[str, str]:
    values = run(2, save, str(folder))
    assert values[0] == values[1]
    return values[0]


@pytest.mark.parametrize(
    ("size", "ours", "how"),
    [
        (2, True, "dcp"),
        *(
            pytest.param(size, ours, how, marks=pytest.mark.slow)
            for size, ours in ((2, True), (1, False), (1, True), (3, True), (4, True))
            for how in ("dcp", "whole")
            if (size, how) != (2, "dcp")
        ),
    ],
)
def test_a_run_goes_on_to_the_bit_on_another_number_of_ranks_or_in_plain_pytorch(
    size, ours, how, saved, folder
):
    """The step after is on equal data on every rank, whose mean is those data's gradient."""
    for value in run(size, resume, str(folder), how, ours):
        assert value[0] == saved[0]
        if size in (1, 2, 4):  # a third of a gradient, three times, is not quite it
            assert value[1] == saved[1]


@pytest.mark.slow
def test_a_save_that_fails_fails_on_all_ranks(tmp_path):
    assert run(2, save_nowhere, str(tmp_path / "missing")) == ["FileNotFoundError"] * 2


def save_nowhere(rank: int, size: int, folder: str) -> str:
    trained = wrapped(*build())
    with pytest.raises(OSError) as caught:
        trained.save_checkpoint(f"{folder}/whole.pt")
    return type(caught.value).__name__


def pickled(rank: int, size: int) -> None:
    model, optimizer = build()
    trained = wrapped(model, optimizer)
    step(trained, optimizer, 0, rank)
    with pytest.raises(RuntimeError, match="only its rows"):
        torch.save(optimizer.state_dict(), f"{rank}.pt")
    torch.save(trained.state_dict(), f"{rank}.pt")  # weights are whole
    trained.unwrap()
    torch.save(optimizer.state_dict(), f"{rank}.pt")


def test_a_file_of_one_ranks_part_that_would_not_say_so_is_refused():
    run(2, pickled)
