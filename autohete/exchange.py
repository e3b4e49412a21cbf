"""Gradients are averaged over the ranks, unit by unit, while backward goes on.

Each backward exchanges every unit once, in one order on all ranks, whatever each rank's backward
did: a unit goes when it has left backward and all before it in that order have gone, the rest when
backward is over. A rank without a gradient sends zeros. So collectives cannot meet the wrong
partner, and ranks may differ in which units they used.

The first backward exchanges everything at its end, to see whose gradients change after their unit
has left (weights that are used outside of it): those always wait for the end. Should others change
behind their exchange later, they go once more; all ranks hear of it.

Everything after (copies to the host, clipping, updates ahead of step()) sees averaged gradients,
the same bits on every rank.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autohete.distributed import Ranks
from autohete.exchange_buckets import Bucket, Version, buckets_of, trained
from autohete.rank_times import ExchangeTimes
from autohete.units import Unit


@dataclass
class _Sent:
    """A unit on its way."""

    unit: int
    memory: Tensor
    parts: list[tuple[Bucket, Tensor, Any]]
    times: ExchangeTimes | None


class GradientExchange:
    """The exchange of one run. Hook thread only.

    Args:
        prepare: makes a unit's gradients plain tensors that may be read and written.
        arrived: a unit's gradients are the averaged ones.
        own_rows: each rank gets the average of the rows that it updates only, which is half of the
            exchange.
    """

    def __init__(
        self,
        ranks: Ranks,
        units: list[Unit],
        prepare: Callable[[int], None],
        arrived: Callable[[int], None],
        own_rows: bool = False,
    ) -> None:
        self.ranks = ranks
        self.own_rows = own_rows
        self._prepare, self._arrived = prepare, arrived
        self._units = units
        self._buckets = [buckets_of(unit, ranks, own_rows) for unit in units]
        self.order = list(reversed(range(len(units))))
        self.enabled = True
        self._in_flight = 1  # units on their way while the next computes
        self._next = 0  # place in the order
        self._left: set[int] = set()  # units whose backward is through
        self._late: set[int] | None = None  # units that wait for the end; None: not known yet
        self._at_leave: dict[int, list[list[Version]]] = {}  # in the first backward
        self._sent: deque[_Sent] = deque()
        self._spare: list[Tensor] = []  # buffers to pack in
        self._alone: set[int] = set()  # units with gradients of this rank only (no_sync)
        self._broken: str | None = None
        self.seconds = 0.0
        """Spent on it so far, waits for other ranks among them."""
        self.packing_seconds = 0.0
        """Of it, what was not spent waiting."""
        self.timing: Callable[[], ExchangeTimes | None] = lambda: None
        self.wants_plan: Callable[[], bool] = lambda: False
        self.plan_is_due = False
        """Some rank wanted a new plan when the last backward ended; all ranks know."""

    # ---------------------------------------------------------------- backward

    def left(self, unit: int) -> None:
        """Backward is through with the unit."""
        if not self.enabled:
            return
        if self._late is None:
            self._at_leave[unit] = self._versions(unit)
            return
        if unit not in self._late:
            self._left.add(unit)
        while self._next < len(self.order) and self.order[self._next] in self._left:
            self._send_next()
        self._land(self._in_flight)

    def finish(self) -> None:
        """Backward is over: exchange what is left, and what changed behind its exchange."""
        if not self.enabled:
            self._alone.update(u for u in self.order if self._has_changed(u))
            self._left.clear()
            return
        self._check()
        late = {u for u, then in self._at_leave.items() if then != self._versions(u)}
        while self._next < len(self.order):
            self._send_next()
            self._land(self._in_flight)
        self._land(0)
        if self._late is None:
            self._late = self._on_any_rank(late)
            self._at_leave.clear()
        else:
            again = self._on_any_rank({u for u in self.order if self._has_changed(u)})
            self._late |= again
            for unit in (u for u in self.order if u in again):
                self._send(unit)
                self._land(0)
        self._next = 0
        self._left.clear()
        self._alone.clear()

    def _send_next(self) -> None:
        self._check()
        unit = self.order[self._next]
        self._next += 1
        self._send(unit)

    @torch.no_grad()
    def _send(self, unit: int) -> None:
        if not (buckets := self._buckets_now(unit)):
            return
        self._prepare(unit)
        start = time.perf_counter()
        memory = self._spare.pop() if self._spare else self._make_buffer(buckets)
        sent, offset = _Sent(unit, memory, [], self.timing()), 0
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in buckets:
                flat = memory[offset : offset + bucket.nbytes].view(bucket.dtype)
                offset += bucket.nbytes
                bucket.pack(flat, self.ranks.size)
                work = bucket.start(flat, self.ranks)
                sent.parts.append((bucket, flat, work))
        if sent.times:
            sent.times.sent(unit, [work for _, _, work in sent.parts])
        self._sent.append(sent)
        self._count(start, packing=True)

    def _land(self, in_flight: int) -> None:
        """Take up what has arrived until at most so many units are on their way."""
        while len(self._sent) > in_flight:
            sent = self._sent.popleft()
            for bucket, flat, work in sent.parts:
                start = time.perf_counter()
                self.ranks.wait(work, "the exchange of gradients", self.ranks.exchange)
                start = self._count(start, packing=False)
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    bucket.unpack(flat)
                self._count(start, packing=True)
            if sent.times:
                sent.times.landed()
            self._spare.append(sent.memory)
            self._arrived(sent.unit)

    def _count(self, start: float, *, packing: bool) -> float:
        """Add what has passed since; return the time."""
        now = time.perf_counter()
        self.seconds += now - start
        if packing:
            self.packing_seconds += now - start
        return now

    def _buckets_now(self, unit: int) -> list[Bucket]:
        """The unit's buckets, made anew when parameters were frozen or thawed since."""
        have = [p for bucket in self._buckets[unit] for p in bucket.parameters]
        wanted = trained(self._units[unit])
        if len(have) != len(wanted) or {id(p) for p in have} != {id(p) for p in wanted}:
            self._buckets[unit] = buckets_of(self._units[unit], self.ranks, self.own_rows)
            self._spare.clear()
        return self._buckets[unit]

    def _make_buffer(self, buckets: list[Bucket]) -> Tensor:
        device = buckets[0].parameters[0].device
        return torch.empty(self._largest(), dtype=torch.uint8, device=device)

    def _largest(self) -> int:
        return max(sum(bucket.nbytes for bucket in buckets) for buckets in self._buckets)

    def _has_changed(self, unit: int) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(any(bucket.changed()) for bucket in self._buckets[unit])

    def _versions(self, unit: int) -> list[list[Version]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [bucket.versions() for bucket in self._buckets[unit]]

    def _on_any_rank(self, units: set[int]) -> set[int]:
        marks = torch.zeros(len(self.order) + 1, dtype=torch.uint8, device="cpu")
        marks[list(units)] = 1
        marks[-1] = int(self.wants_plan())
        start = time.perf_counter()
        work = dist.all_reduce(marks, dist.ReduceOp.MAX, group=self.ranks.host, async_op=True)
        self.ranks.wait(work, "the end of backward", self.ranks.host)
        self._count(start, packing=False)
        *of_units, plan = marks.tolist()
        self.plan_is_due = self.plan_is_due or bool(plan)
        return {unit for unit, mark in enumerate(of_units) if mark}

    # ---------------------------------------------------------------- around it

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay this rank's own until the next backward outside."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @torch.no_grad()
    def clip_own_rows(self, limit: float) -> None:
        """Scale gradients of which each rank has its rows to at most this total norm. Collective.

        As torch.nn.utils.clip_grad_norm_ does; a parameter that all have whole counts once.
        """
        square = torch.zeros((), dtype=torch.float64, device="cpu")
        parts = [p for buckets in self._buckets for b in buckets for p in b.own_parts()]
        for part, counts in parts:
            if counts:
                square += torch.linalg.vector_norm(part).double().cpu().square()
        work = dist.all_reduce(square, group=self.ranks.host, async_op=True)
        self.ranks.wait(work, "the norm of all gradients", self.ranks.host)
        factor = min(limit / (square.sqrt().item() + 1e-6), 1.0)
        for part, _ in parts if factor != 1.0 else ():
            part.mul_(factor)

    def check_step(self) -> None:
        """Raise ValueError where a step would use gradients of this rank alone."""
        if any(self._has_changed(u) for u in self._alone):
            raise ValueError(
                "step(): the last backward was under no_sync(), expected one outside of it before "
                "each step, so that all ranks take the same step; leave no_sync() for the last "
                "micro-batch"
            )
        self._alone.clear()
        for buckets in self._buckets:
            for bucket in buckets:
                bucket.step_taken()

    def abandon(self) -> None:
        """Backward was left by an exception; the others may wait for what does not come."""
        if self._sent or self._next:
            self._broken = "a backward was left by an exception while gradients were exchanged"
        self._left.clear()

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(
                f"autohete: {self._broken}, so the ranks do not agree any more what comes next; "
                "start again from the last checkpoint"
            )

    def exchanged_bytes(self) -> int:
        """Bytes of all gradients that each backward exchanges."""
        return sum(bucket.nbytes for buckets in self._buckets for bucket in buckets)

    def device_bytes(self) -> int:
        """Bytes that the exchange needs on the device beside the gradients of the unit it is at."""
        return (2 * self._in_flight + 1) * self._largest()

    def do_without_overlap(self) -> int:
        """Wait for each unit before the next one; return the bytes of the device that this saves.

        The order stays what it is, so ranks need not do it at the same time.
        """
        before = self.device_bytes()
        self._in_flight = 0
        self._spare.clear()
        return before - self.device_bytes()
