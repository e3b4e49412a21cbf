"""How fast the ranks' collectives are, and what they take from the rest: timed, or stated.

Every rank times the same few collectives at the same time; the slowest counts (rank_plans.py). It
takes a fraction of a second to a few seconds, once a run, with what the run itself uses: its
groups, and tensors of the size of its units.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autohete import _C
from autohete.distributed import Ranks, ranks_here
from autohete.exchange_buckets import NEVER, Bucket, buckets_of, trained
from autohete.units import Unit

_SMALL, _MOST = 4 << 10, 32 << 20  # bytes
_TURNS_BYTES, _MOST_TURNS = 64 << 20, 32  # gradients of a machine's ranks that take turns
_REPEATS, _MOST_REPEATS = 5, 40
_ENOUGH_SECONDS = 0.2  # on one collective, once it was repeated; a short one is noisier
_MOST_SECONDS = 2.0  # on one collective, so that a slow link is not timed for minutes
_BESIDE = 12  # exchanges that compute is beside
_PIECE = 192  # rows of the matrices that stand for compute


def stated_rates(ranks: Ranks, bytes_per_second: float, own_rows: bool) -> _C.RankProfile:
    """Return what a user says of the link among the ranks: no latency, nothing else slows down.

    Args:
        bytes_per_second: that a rank sends and receives.
        own_rows: gradients are averaged in rows only, which moves half.
    """
    rates = _C.RankProfile()
    rates.num_ranks, rates.own_gradients = ranks.size, own_rows
    share = (ranks.size - 1) / ranks.size
    rates.exchange_bytes_per_second = bytes_per_second / (share if own_rows else 2 * share)
    rates.gather_bytes_per_second = bytes_per_second / share
    rates.device_gather_bytes_per_second = bytes_per_second / share
    rates.pack_bytes_per_second = 1e12
    rates.collective_share_during_other = 0.5
    return rates


def measured_rates(
    ranks: Ranks, device: torch.device, unit: Unit, own_rows: bool
) -> _C.RankProfile:
    """Time the collectives of a run. Collective; nothing of the run may be in flight.

    Args:
        unit: whose gradients are the largest.
        own_rows: gradients are averaged in rows only.
    """
    timer = _Timer(ranks, device, unit, own_rows)
    rates = _C.RankProfile()
    rates.num_ranks, rates.own_gradients = ranks.size, own_rows
    for name, time_of in (
        ("exchange", lambda what: timer.exchange(what)[0]),
        ("gather", timer.gathers_on_host),
        ("device_gather", timer.gathers_on_device),
    ):
        latency, rate = timer.line(time_of)
        setattr(rates, f"{name}_latency_seconds", latency)
        setattr(rates, f"{name}_bytes_per_second", rate)
    rates.pack_bytes_per_second = timer.pack_rate()
    rates.collective_share_during_other = 0.5  # one link for both
    if device.type == "cpu":  # cores are shared; a GPU's collectives leave compute alone
        compute, collective = timer.shares(rates)
        rates.compute_share_during_collective = compute
        rates.cpu_share_during_collective = compute
        rates.collective_share_during_compute = collective
        rates.collective_share_during_cpu = collective
    return rates


def _alike(unit: Unit, device: torch.device, most_bytes: int) -> list[nn.Parameter]:
    """Parameters as the unit's, with gradients; rows are left out where it is larger."""
    wanted = trained(unit)
    share = min(most_bytes / max(sum(p.nbytes for p in wanted), 1), 1.0)
    alike = []
    for p in wanted:
        shape = [max(int(len(p) * share), 1), *p.shape[1:]] if p.dim() else []
        one = nn.Parameter(torch.empty(shape, dtype=p.dtype, device=device))
        one.grad = torch.ones_like(one)
        alike.append(one)
    return alike


class _Exchanged:
    """Gradients as a unit's, by themselves in memory."""

    def __init__(
        self, unit: Unit, ranks: Ranks, device: torch.device, own_rows: bool, most_bytes: int
    ) -> None:
        self.parameters = _alike(unit, device, most_bytes)
        self.buckets = buckets_of(Unit("timed", [], self.parameters), ranks, own_rows)
        self.nbytes = sum(p.nbytes for p in self.parameters)

    def views(self, memory: Tensor) -> list[tuple[Bucket, Tensor]]:
        """Where in `memory` each bucket is packed."""
        views, offset = [], 0
        for bucket in self.buckets:
            piece = memory[offset : offset + bucket.nbytes]
            views.append((bucket, piece.view(bucket.dtype)))
            offset += bucket.nbytes
        return views


class _Timer:
    """Collectives of the run's groups, on memory of their own, for as long as it lives.

    A step comes to each unit's gradients after so much else that no cache holds them. So several
    of a unit's size take turns, on a CPU together larger than its caches.
    """

    def __init__(self, ranks: Ranks, device: torch.device, unit: Unit, own_rows: bool) -> None:
        self._ranks, self._device = ranks, device

        def make(most_bytes: int) -> _Exchanged:
            return _Exchanged(unit, ranks, device, own_rows, most_bytes)

        self._small, first = make(_SMALL), make(_MOST)
        turns_bytes = _TURNS_BYTES // ranks_here() if device.type == "cpu" else 0
        count = -(-turns_bytes // max(first.nbytes, 1))
        others = [make(_MOST) for _ in range(min(count, _MOST_TURNS) - 1)]
        self._turns = cycle([first, *others])
        self._large_bytes = max(first.nbytes, 1)
        length = sum(bucket.nbytes for bucket in first.buckets)
        self._memory = torch.zeros(length, dtype=torch.uint8, device=device)

    def exchange(self, what: _Exchanged) -> tuple[float, float]:
        """Exchange a unit's gradients as a step does.

        Returns: seconds of the collective, and of packing and taking up together.
        """
        start = time.perf_counter()
        views = what.views(self._memory)
        with torch.no_grad():
            for bucket, flat in views:
                bucket.known = [NEVER] * len(bucket.parameters)  # so that all is new
                bucket.pack(flat, self._ranks.size)
            self._settle()
            packed = time.perf_counter()
            works = [bucket.start(flat, self._ranks) for bucket, flat in views]
            for work in works:
                self._wait(work)
            came = time.perf_counter()
            for bucket, flat in views:
                bucket.unpack(flat)
            self._settle()
        return came - packed, packed - start + time.perf_counter() - came

    def gathers_on_host(self, what: _Exchanged) -> float:
        gradients = [p.grad.cpu() for p in what.parameters if p.grad is not None]
        return self._gathers(gradients, self._ranks.parts)

    def gathers_on_device(self, what: _Exchanged) -> float:
        gradients = [p.grad for p in what.parameters if p.grad is not None]
        return self._gathers(gradients, self._ranks.exchange)

    def _gathers(self, tensors: list[Tensor], group: Any) -> float:
        shared = [t for t in tensors if t.dim() and t.numel()]
        start = time.perf_counter()
        self._ranks.bring_parts(shared, group)
        self._settle()
        return time.perf_counter() - start

    def _wait(self, work: Any) -> None:
        self._ranks.wait(work, "timing the exchange of gradients", self._ranks.exchange)
        self._settle()

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def seconds(self, run: Callable[[], float]) -> float:
        """Median of what a few runs return, each begun together; one alone where it takes long on
        any rank.
        """
        run()  # connections are made, memory is touched
        taken: list[float] = []
        enough = False
        start = time.perf_counter()
        while not enough:
            self._ranks.gather(None)
            taken.append(run())
            spent = max(self._ranks.gather(time.perf_counter() - start))  # all stop together
            num = len(taken)
            enough = num >= _REPEATS and (spent > _ENOUGH_SECONDS or num >= _MOST_REPEATS)
            enough = enough or spent > _MOST_SECONDS
        return max(median(taken), 1e-9)

    def line(self, time_of: Callable[[_Exchanged], float]) -> tuple[float, float]:
        """Latency and bytes per second of t = latency + bytes / rate through two sizes."""
        small = self._small
        at_small = self.seconds(lambda: time_of(small))
        at_large = self.seconds(lambda: time_of(next(self._turns)))
        rate = max(self._large_bytes - small.nbytes, 1) / max(at_large - at_small, 1e-9)
        return max(at_small - small.nbytes / rate, 0.0), rate

    def pack_rate(self) -> float:
        """Bytes per second of what laying out and taking up gradients do, the mean of both."""
        return 2 * self._large_bytes / self.seconds(lambda: self.exchange(next(self._turns))[1])

    def shares(self, rates: _C.RankProfile) -> tuple[float, float]:
        """What compute and an exchange keep of their rates beside each other, on shared cores.

        Of several exchanges, one after the other as in backward: what one alone shows depends on
        when the system's scheduler looked. An exchange's share is of the rate that was found, so
        that both together give what it takes beside compute, which is what most of them take.
        """
        alone = self._large_bytes / rates.exchange_bytes_per_second
        alone += rates.exchange_latency_seconds
        piece = self.seconds(_compute)
        longest = max(self._ranks.gather(alone))
        count = 1 if longest * _BESIDE > _MOST_SECONDS else _BESIDE
        times = 1 if longest * count * _REPEATS > _MOST_SECONDS else _REPEATS
        both = [self._shares_of(count, alone, piece) for _ in range(times)]
        return median(share for share, _ in both), median(share for _, share in both)

    def _shares_of(self, count: int, alone: float, piece: float) -> tuple[float, float]:
        views = next(self._turns).views(self._memory)
        self._ranks.gather(None)
        pieces = 0
        start = time.perf_counter()
        for _ in range(count):
            works = [bucket.start(flat, self._ranks) for bucket, flat in views]
            while not all(work.is_completed() for work in works):
                _compute()
                pieces += 1
            for work in works:
                self._wait(work)
        both = time.perf_counter() - start
        return _share(pieces * piece, both), _share(count * alone, both)


def _compute() -> float:
    """A little of it, as a layer's; returns its seconds."""
    start = time.perf_counter()
    a = torch.ones(_PIECE, _PIECE)
    torch.mm(a, a)
    return time.perf_counter() - start


def _share(alone: float, beside: float) -> float:
    return min(max(alone / beside, 0.05), 1.0)
