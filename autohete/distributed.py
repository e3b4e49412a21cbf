"""The ranks that train one model together: a process group of torch.distributed, and who is alive.

No launcher, rendezvous or collective of our own. A run has three groups over the same ranks, so
that collectives of its two threads can never meet: `exchange` for tensors of the device and `host`
for those of the host, both from the hook thread; `parts` for parameters that were updated, from the
engine's share thread, which takes units in the order of step().

A rank that ends says so, or stops beating in the group's store; whoever waits for it raises an
error that names it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autohete.machine_memory import MachineMemory
from autohete.pulse import Pulse, store_of

T = TypeVar("T")
# Its name since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SEARCH_SECONDS = 15.0  # how long an error waits for a rank to be found silent
_PIECE_BYTES = 16 << 20


def ranks_here() -> int:
    """Return how many ranks share this machine's memory and cores (torchrun says so)."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def rank_of_launch() -> int:
    """Return which of torchrun's processes this is; 0 where there is no launcher."""
    return int(os.environ.get("RANK", "0")) if _launched() else 0


def size_of_launch() -> int:
    """Return how many processes torchrun started; 1 where there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if _launched() else 1


def device_of_launch(device: torch.device) -> torch.device:
    """Return the GPU of this rank where only "cuda" was asked for, and make it the current one."""
    asked: int | None = device.index
    if device.type != "cuda" or asked is not None or size_of_launch() < 2:
        return device
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.current_device() == 0 and index < torch.cuda.device_count():
        torch.cuda.set_device(index)
    return torch.device("cuda", torch.cuda.current_device())


def _launched() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


def find_group(process_group: Any, device: torch.device) -> Ranks | None:
    """Return the ranks to train with; None where this process trains alone.

    Args:
        process_group: of torch.distributed; None: all ranks, where torch.distributed is initialised
            or torchrun started this process (it is initialised then); False: alone in any case.
        device: where the forward runs.
    """
    if process_group is False or not dist.is_available():
        return None
    if not dist.is_initialized():
        if size_of_launch() < 2:
            return None
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
    if process_group is None:
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group is {process_group!r}, expected a group of torch.distributed that this "
            "rank is in, None for all ranks, or False to train alone"
        )
    if dist.get_world_size(process_group) < 2:
        return None
    return Ranks(process_group, device)


class Ranks:
    """A group of ranks, as one of them sees it.

    Every method but `wait` and `close` is collective: all ranks call it, in the same order.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        members = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = len(members)
        self._members = members
        local = len(members) != dist.get_world_size()
        backend = "gloo" if device.type == "cpu" else "nccl"
        self.exchange: Any = dist.new_group(
            members, backend=backend, use_local_synchronization=local
        )
        self.host: Any = dist.new_group(members, backend="gloo", use_local_synchronization=local)
        self.parts: Any = dist.new_group(members, backend="gloo", use_local_synchronization=local)
        self._on_gpu = device.type != "cpu"
        self.failed = False
        # Between ranks of one machine, which torchrun tells; asked for at the first parts.
        self._memory: MachineMemory | None = None
        if self.size <= ranks_here():
            self._memory = MachineMemory(
                self.rank, self.size, self._share_parts, self._all_of_parts
            )
        self._meshes: dict[str, Any] = {}  # by device type
        self._buffers: dict[Any, Tensor] = {}  # by group
        self.parts_seconds = 0.0
        """Spent by the share thread on parts so far, waits for other ranks among them."""
        self._pulse = Pulse(store_of(self.host), self.rank, self.size)

    def name(self, index: int) -> str:
        """Return a member's name as torch.distributed counts it."""
        return f"rank {self._members[index]}"

    # ---------------------------------------------------------------- waiting

    def wait(self, work: Any, what: str, group: Any) -> None:
        """Wait for a collective of one of the groups; on a GPU, let the current stream wait.

        Raises:
            RuntimeError: it failed, or a rank has ended; the message names the rank.
        """
        while True:
            try:
                if group is self.exchange and self._on_gpu:
                    work.wait()  # NCCL gives up by itself
                else:
                    work.wait(timedelta(seconds=1))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._explained(error, what) from error
            if silent := self._pulse.silent():
                raise self._lost(silent, what, "nothing has come for a second or more")

    def _explained(self, error: Exception, what: str) -> RuntimeError:
        """Find out whose end it was that made a collective fail."""
        self.failed = True
        if silent := self._pulse.wait_for_silent(_SEARCH_SECONDS):
            return self._lost(silent, what, str(error).strip().splitlines()[0])
        return RuntimeError(
            f"autohete: {what} failed on {self.name(self.rank)} ({error}), though all ranks "
            "answer; look at the first error of the other ranks"
        )

    def _lost(self, silent: dict[int, str], what: str, why: str) -> RuntimeError:
        self.failed = True
        names = ", ".join(f"{self.name(i)} {how}" for i, how in sorted(silent.items()))
        return RuntimeError(
            f"autohete: {what} on {self.name(self.rank)} waits for ranks that are gone: {names} "
            f"({why}); all ranks have to take the same number of steps (an uneven last batch?). "
            "Start again from the last checkpoint"
        )

    # ---------------------------------------------------------------- values of the host

    def share(self, value: T) -> T:
        """Return the first rank's value."""
        box = [value]
        with self._naming("sharing the plan"):
            dist.broadcast_object_list(box, group=self.host, group_src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        with self._naming("gathering values"):
            dist.all_gather_object(values, value, group=self.host)
        return values

    def all_of(self, yes: bool) -> bool:
        """Return whether every rank said yes."""
        return all(self.gather(yes))

    def first_does(self, work: Callable[[], None]) -> None:
        """Let the first rank do something and wait for it.

        Raises:
            Exception: what it raised there, on all ranks.
        """
        failure: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                failure = error
        failure = self.share(failure)
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _naming(self, what: str) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, what) from error

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first rank's values, through the host, in pieces."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            in_place = flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr()
            step = max(_PIECE_BYTES // max(flat.element_size(), 1), 1)
            for piece in flat.split(step) if flat.numel() else ():
                there = piece.cpu().view(torch.uint8) if piece.dtype != torch.bool else piece.cpu()
                work = dist.broadcast(there, group=self.host, group_src=0, async_op=True)
                self.wait(work, "sharing the first rank's parameters", self.host)
                if self.rank:
                    piece.copy_(there.view(piece.dtype))
            if self.rank and not in_place:
                tensor.detach().copy_(flat.view(tensor.shape))

    # ---------------------------------------------------------------- parts

    def bring_parts(self, tensors: Sequence[Tensor], group: Any) -> None:
        """Each rank has new values in its rows of every tensor: give them to all.

        Args:
            tensors: contiguous; rank r has rows [r * n, (r + 1) * n), n = rows / size, rounded up.
            group: `parts` from the share thread, `exchange` from the hook thread.
        """
        start = time.perf_counter()
        with torch.no_grad():
            rows = [-(-len(t) // self.size) for t in tensors]
            sizes = [n * t.nbytes // len(t) for n, t in zip(rows, tensors, strict=True)]
            length = sum(sizes)
            every = self._memory.rows(length) if self._memory and group is self.parts else None
            seen_by_all = every is not None
            if every is None:
                every = self._buffer(group, self.size * length, tensors[0].device)
                every = every.view(self.size, length)
            for mine, theirs in self._pairs(every[self.rank], tensors, rows, self.rank):
                mine.copy_(theirs)
            if seen_by_all:
                work = dist.barrier(group=group, async_op=True)
            else:
                work = _all_gather(every.view(-1), every[self.rank], group=group, async_op=True)
            self.wait(work, "bringing updated parameters together", group)
            for rank in range(self.size):
                if rank != self.rank:
                    for theirs, mine in self._pairs(every[rank], tensors, rows, rank):
                        mine.copy_(theirs)
        if group is self.parts:
            self.parts_seconds += time.perf_counter() - start

    def _share_parts(self, value: T) -> T:
        """share(), from the share thread."""
        box = [value]
        with self._naming("sharing memory"):
            dist.broadcast_object_list(box, group=self.parts, group_src=0)
        return box[0]

    def _all_of_parts(self, yes: bool) -> bool:
        """all_of(), from the share thread."""
        answer = torch.tensor([yes], dtype=torch.uint8, device="cpu")
        work = dist.all_reduce(answer, dist.ReduceOp.MIN, group=self.parts, async_op=True)
        self.wait(work, "sharing memory", self.parts)
        return bool(answer.item())

    def _buffer(self, group: Any, length: int, device: torch.device) -> Tensor:
        """Memory to gather in, kept: one for each thread, as large as the largest unit."""
        have = self._buffers.get(group)
        if have is None or len(have) < length:
            have = self._buffers[group] = torch.empty(length, dtype=torch.uint8, device=device)
        return have[:length]

    def _pairs(
        self, packed: Tensor, tensors: Sequence[Tensor], rows: list[int], rank: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What of `packed` belongs to a rank, and the same bytes in the tensors."""
        offset = 0
        for tensor, n in zip(tensors, rows, strict=True):
            begin, end = min(rank * n, len(tensor)), min((rank + 1) * n, len(tensor))
            place = tensor[begin:end].reshape(-1).view(torch.uint8)
            yield packed[offset : offset + len(place)], place
            offset += n * tensor.nbytes // len(tensor)

    def shown(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's rows of something shaped like `parameter` as the whole, sharded.

        It holds `part` itself, no view of it.
        """
        from autohete.rank_state import shown_whole

        kind = part.device.type
        if kind not in self._meshes:
            group = self.host if kind == "cpu" else self.exchange
            self._meshes[kind] = DeviceMesh.from_group(group, kind)
        return shown_whole(part, parameter, self._meshes[kind])

    def close(self) -> None:
        """Say goodbye. Waits for nobody."""
        self._pulse.stop("has left (unwrapped)")
