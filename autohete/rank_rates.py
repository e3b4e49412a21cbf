"""How fast the ranks' collectives are, and what they take from the rest: timed, or stated.

Every rank times the same few collectives at the same time; the slowest counts (rank_plans.py). It
takes a fraction of a second to a few seconds, once a run, with what the run itself uses: its
groups, and tensors of the size of its units.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from autohete import _C
from autohete.distributed import Ranks
from autohete.exchange_buckets import NEVER, Bucket, buckets_of
from autohete.units import Unit

_SMALL, _LEAST, _MOST = 4 << 10, 1 << 20, 32 << 20  # bytes
_REPEATS = 3
_MOST_SECONDS = 2.0  # on one collective, so that a slow link is not timed for minutes
_PIECES, _PIECE = 8, 192  # products of matrices of so many rows: compute beside a collective


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
    ranks: Ranks, device: torch.device, unit_bytes: int, own_rows: bool
) -> _C.RankProfile:
    """Time the collectives of a run. Collective; nothing of the run may be in flight.

    Args:
        unit_bytes: of the largest unit's gradients.
        own_rows: gradients are averaged in rows only.
    """
    timer = _Timer(ranks, device, own_rows)
    large = max(_LEAST, min(unit_bytes, _MOST)) // _SMALL * _SMALL
    rates = _C.RankProfile()
    rates.num_ranks, rates.own_gradients = ranks.size, own_rows
    rates.exchange_latency_seconds, rates.exchange_bytes_per_second = timer.line(
        timer.exchange, large
    )
    rates.gather_latency_seconds, rates.gather_bytes_per_second = timer.line(
        timer.gather_on_host, large
    )
    if device.type == "cpu":  # one memory: the same gather
        rates.device_gather_latency_seconds = rates.gather_latency_seconds
        rates.device_gather_bytes_per_second = rates.gather_bytes_per_second
    else:
        rates.device_gather_latency_seconds, rates.device_gather_bytes_per_second = timer.line(
            timer.gather_on_device, large
        )
    rates.pack_bytes_per_second = timer.pack_rate(large)
    rates.collective_share_during_other = 0.5  # one link for both
    if device.type == "cpu":  # cores are shared; a GPU's collectives leave compute alone
        compute, collective = timer.shares(large)
        rates.compute_share_during_collective = compute
        rates.cpu_share_during_collective = compute
        rates.collective_share_during_compute = collective
        rates.collective_share_during_cpu = collective
    return rates


class _Timer:
    """Collectives of the run's groups, on memory of their own, for as long as it lives."""

    def __init__(self, ranks: Ranks, device: torch.device, own_rows: bool) -> None:
        self._ranks, self._device, self._own_rows = ranks, device, own_rows

    def bucket(self, num_bytes: int) -> tuple[Bucket, Tensor]:
        """What a unit of one parameter of so many bytes exchanges."""
        p = nn.Parameter(torch.zeros(num_bytes // 4, device=self._device))
        p.grad = torch.zeros_like(p)
        (bucket,) = buckets_of(Unit("timed", [], [p]), self._ranks, self._own_rows)
        flat = torch.zeros(bucket.nbytes // 4, device=self._device)
        bucket.pack(flat, self._ranks.size)
        return bucket, flat

    def exchange(self, num_bytes: int) -> Callable[[], None]:
        bucket, flat = self.bucket(num_bytes)

        def run() -> None:
            work = bucket.start(flat, self._ranks)
            self._ranks.wait(work, "timing the exchange of gradients", self._ranks.exchange)
            self._settle()

        return run

    def gather_on_host(self, num_bytes: int) -> Callable[[], None]:
        rows = torch.zeros(num_bytes // 4, device="cpu")
        return lambda: self._ranks.bring_parts([rows], self._ranks.parts)

    def gather_on_device(self, num_bytes: int) -> Callable[[], None]:
        rows = torch.zeros(num_bytes // 4, device=self._device)

        def run() -> None:
            self._ranks.bring_parts([rows], self._ranks.exchange)
            self._settle()

        return run

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def seconds(self, run: Callable[[], None]) -> float:
        """Median of a few, each begun together; one alone where it takes long on any rank."""
        run()  # connections are made, memory is touched
        taken: list[float] = []
        enough = False
        while not enough:
            self._ranks.gather(None)
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
            spent = max(self._ranks.gather(sum(taken)))  # all stop together
            enough = len(taken) == _REPEATS or spent > _MOST_SECONDS
        return max(median(taken), 1e-9)

    def line(self, make: Callable[[int], Callable[[], None]], large: int) -> tuple[float, float]:
        """Latency and bytes per second of t = latency + bytes / rate through two sizes."""
        at_small, at_large = self.seconds(make(_SMALL)), self.seconds(make(large))
        rate = (large - _SMALL) / max(at_large - at_small, 1e-9)
        return max(at_small - _SMALL / rate, 0.0), rate

    def pack_rate(self, num_bytes: int) -> float:
        """Bytes per second of what laying out and taking up gradients do, the mean of both."""
        bucket, flat = self.bucket(num_bytes)

        @torch.no_grad()
        def run() -> None:
            bucket.known = [NEVER]  # so that all is new
            bucket.pack(flat, self._ranks.size)
            bucket.unpack(flat)
            self._settle()

        return 2 * num_bytes / self.seconds(run)

    def shares(self, num_bytes: int) -> tuple[float, float]:
        """What compute and a collective keep of their rates beside each other, on shared cores."""
        bucket, flat = self.bucket(num_bytes)
        a, b = torch.ones(_PIECE, _PIECE), torch.ones(_PIECE, _PIECE)
        alone = self.seconds(self.exchange(num_bytes))

        def compute() -> None:
            for _ in range(_PIECES):
                torch.mm(a, b)

        piece = self.seconds(compute) / _PIECES
        pieces = max(int(alone / piece), 1)
        found = []
        for _ in range(_REPEATS):
            self._ranks.gather(None)
            start = time.perf_counter()
            work = bucket.start(flat, self._ranks)
            ended = 0.0
            for _ in range(pieces):
                torch.mm(a, b)
                if not ended and work.is_completed():
                    ended = time.perf_counter() - start
            computed = time.perf_counter() - start
            self._ranks.wait(work, "timing the exchange of gradients", self._ranks.exchange)
            both = time.perf_counter() - start
            found.append(_shares(alone, pieces * piece, ended, computed, both))
        return median(c for c, _ in found), median(e for _, e in found)


def _shares(
    alone: float, compute: float, ended: float, computed: float, both: float
) -> tuple[float, float]:
    """Of compute and of the collective, from when each was over.

    Args:
        alone, compute: seconds of the collective and of the compute by themselves.
        ended: when the collective was over, 0 where compute was over first.
        computed, both: when compute was, and both.
    """
    if ended:
        shares = ((compute - (computed - ended)) / ended, alone / ended)
    else:
        shares = (compute / computed, (alone - (both - computed)) / computed)
    low, high = (min(max(share, 0.05), 1.0) for share in shares)
    return low, high
