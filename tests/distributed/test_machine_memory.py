"""Updated parameters of one machine's ranks pass through memory that all of them see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from autohete import machine_memory
from autohete.distributed import Ranks

SHAPES = [(7, 3), (1, 5), (12,), (2, 2, 2), (40, 9)]  # fewer rows than ranks among them


def own_and_others(rank: int, size: int, turn: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of which this rank's rows are right, and what they have to become."""
    mine, whole = [], []
    for i, shape in enumerate(SHAPES[: 1 + turn % len(SHAPES)]):
        torch.manual_seed(100 * turn + i)
        right = torch.randn(shape)
        rows = -(-len(right) // size)
        wrong = torch.full(shape, float("nan"))
        wrong[rank * rows : (rank + 1) * rows] = right[rank * rows : (rank + 1) * rows]
        mine.append(wrong)
        whole.append(right)
    return mine, whole


def gathered(rank: int, size: int, elsewhere: int | None) -> list[bool]:
    """Bring parts together ten times; returns, of each, whether it went through memory."""
    if rank == elsewhere:
        other = Path("other_machine")
        other.write_text("another machine")
        machine_memory._BOOT_ID = other
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    rows, through_memory = ranks._memory.rows, []  # type: ignore[union-attr]

    def seen(length: int) -> Tensor | None:
        there = rows(length)
        through_memory.append(there is not None)
        return there

    ranks._memory.rows = seen  # type: ignore[union-attr, method-assign]
    for turn in range(10):
        mine, whole = own_and_others(rank, size, turn)
        ranks.bring_parts(mine, ranks.parts)
        for got, right in zip(mine, whole, strict=True):
            assert torch.equal(got, right)
    return through_memory


@pytest.mark.parametrize("size", [2, 3])
def test_parts_come_together_through_the_memory_of_the_machine(size):
    assert run(size, gathered, None) == [[True] * 10] * size


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_where_one_rank_is_elsewhere_all_use_the_network(elsewhere):
    assert run(2, gathered, elsewhere) == [[False] * 10] * 2


def kept(rank: int, size: int) -> list[Any]:
    """The second rank reads a round's rows when the first has written those of the next one."""
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    store, read = dist.distributed_c10d._get_default_store(), []
    for turn in range(6):
        rows = ranks._memory.rows(16)  # type: ignore[union-attr]
        assert rows is not None
        rows[rank] = turn
        if rank == 0 and turn > 0:
            store.set(f"written {turn}", "")
        if rank == 1 and turn > 0:
            store.wait([f"written {turn}"])
            read.append(before[0, 0].item())  # noqa: F821  (of the turn before)
        before = rows  # noqa: F841
        dist.barrier()
    return read


def test_what_is_still_read_is_not_written():
    assert run(2, kept)[1] == [0, 1, 2, 3, 4]
