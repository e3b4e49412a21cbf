"""Run one function as several ranks over gloo, and collect what each returns or how it ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ranks are forked from a server that has imported torch and trained nothing: quick, and clean.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["autohete", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict", "pytest"]
)


@dataclass
class Ended:
    """How one rank ended."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    seconds: float = 0.0


def _rank(
    function: Callable[..., Any], rank: int, size: int, folder: str, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(size)
    os.chdir(folder)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
    ended = Ended()
    try:
        ended.value = function(rank, size, *args)
    except BaseException:
        ended.error = traceback.format_exc()
    whole = Path(folder, f"{rank}.part")
    whole.write_bytes(pickle.dumps(ended))
    whole.rename(Path(folder, f"{rank}.result"))
    if ended.error is None and size > 1:
        dist.destroy_process_group()
    os._exit(0 if ended.error is None else 1)  # a failed group must not hold its rank up


def run(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, may_fail: bool = False
) -> list[Any]:
    """Return `function(rank, size, *args)` of every rank, or an `Ended` of each with `may_fail`."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        ranks = [
            _CONTEXT.Process(target=_rank, args=(function, rank, size, folder, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        ended = [_wait_for(p, r, folder, start, timeout) for r, p in enumerate(ranks)]
    if may_fail:
        return ended
    for rank, one in enumerate(ended):
        assert one.error is None, f"rank {rank}:\n{one.error}"
        assert one.exitcode == 0, f"rank {rank} ended with {one.exitcode}"
    return [one.value for one in ended]


def _wait_for(process: Any, rank: int, folder: str, start: float, timeout: float) -> Ended:
    process.join(max(start + timeout - time.monotonic(), 0.1))
    seconds = time.monotonic() - start
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    result = Path(folder, f"{rank}.result")
    ended = pickle.loads(result.read_bytes()) if result.exists() else Ended()
    if late:
        ended.error = f"still running after {timeout} s; {ended.error}"
    ended.exitcode, ended.seconds = process.exitcode, seconds
    return ended
