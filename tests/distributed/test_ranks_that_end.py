"""One rank ends: the others end soon, with an error that names it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from loops import Setup, full, hash_of, part
from models import make_gpt
from oracle import adamw, forced_plan
from ranks import run

from autohete import AutoHeteWrapper


def trainer(**options: Any) -> tuple[Any, Any]:
    model = make_gpt(layers=2, dropout=0.0)
    optimizer = adamw(model)
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "plan": forced_plan(model, "all+c")}
    trained = AutoHeteWrapper(model, optimizer, profile_path=None, **{**keywords, **options})
    return trained.to("cpu"), optimizer


def step(trained: Any, optimizer: Any, number: int, rank: int) -> None:
    trained(*part(Setup(), number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def killed(rank: int, size: int, victim: int) -> None:
    trained, optimizer = trainer()
    for number in range(100):
        if rank == victim and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        step(trained, optimizer, number, rank)


@pytest.mark.parametrize(
    ("size", "victim"),
    [(2, 1)] + [pytest.param(n, v, marks=pytest.mark.slow) for n, v in ((3, 1), (3, 0), (4, 3))],
)
def test_a_killed_rank_is_named_by_all_others_within_30_seconds(size, victim):
    start = time.monotonic()
    ended = run(size, killed, victim, timeout=60, may_fail=True)
    assert time.monotonic() - start < 40  # with the start of the processes
    for rank, one in enumerate(ended):
        if rank == victim:
            assert one.exitcode == -signal.SIGKILL
            continue
        assert one.exitcode == 1
        assert f"rank {victim} " in (one.error or "").splitlines()[-1]


class BroughtError(Exception):
    pass


def asks_again(rank: int, size: int) -> list[str]:
    """Bringing parts together fails on a thread of the engine's; everybody who asks hears of it."""
    trained, optimizer = trainer()
    step(trained, optimizer, 0, rank)
    trained.run.synchronize()

    def fails(*_: Any) -> None:
        raise BroughtError("as it was raised")

    trained.run.ranks.bring_parts = fails
    with contextlib.suppress(BroughtError):  # by then, or not
        step(trained, optimizer, 1, rank)
    heard = []
    for ask in (trained.run.synchronize, trained.run.synchronize, trained.state_dict):
        with pytest.raises(BroughtError) as error:
            ask()
        heard.append(str(error.value))
    return heard


def test_an_error_of_the_engines_threads_can_be_raised_again():
    for heard in run(2, asks_again):
        assert heard == ["as it was raised"] * 3


def uneven(rank: int, size: int) -> None:
    """The last rank has one batch less."""
    trained, optimizer = trainer()
    last = rank == size - 1
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    try:
        for number in range(4 if last else 5):
            step(trained, optimizer, number, rank)
        trained.run.synchronize()
        trained.run.ranks.close()
        if last:
            store.wait(["over"], timedelta(seconds=40))  # lives on: only the group was left
    finally:
        store.set("over", "")


@pytest.mark.slow
def test_ranks_with_one_batch_more_say_who_has_left():
    ended = run(2, uneven, timeout=60, may_fail=True)
    assert "rank 1 has left" in ended[0].error
    assert "same number of steps" in ended[0].error
    assert ended[0].seconds < 20


# ------------------------------------------------------------------- after it


def until_killed(rank: int, size: int, folder: str, stop: int | None, first: int) -> str:
    """Train to step 4, saving after each step; one rank is killed before step `stop`."""
    trained, optimizer = trainer()
    if first:
        assert trained.load_checkpoint(f"{folder}/run.pt") == {"steps": first}
    for number in range(first, 4):
        if number == stop and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(trained, optimizer, number, rank)
        trained.save_checkpoint(f"{folder}/run.pt", steps=number + 1)
    states = [full(v) for p in trained.parameters() for v in optimizer.state[p].values()]
    return hash_of([*trained.parameters(), *states])


@pytest.mark.slow
def test_a_run_resumed_from_its_last_checkpoint_is_the_run_without_the_kill(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = run(2, until_killed, str(tmp_path / "whole"), None, 0)
    ended = run(2, until_killed, str(tmp_path), 2, 0, may_fail=True)
    assert [one.exitcode for one in ended] == [1, -signal.SIGKILL]
    assert run(2, until_killed, str(tmp_path), None, 2) == whole
