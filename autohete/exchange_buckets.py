"""What of a unit's gradients goes over the ranks as one tensor, and how it comes back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete.distributed import Ranks
from autohete.units import Unit

_ALIGNMENT = 64


class Version:
    """A gradient, weakly, and its version counter."""

    __slots__ = ("ref", "version")

    def __init__(self, gradient: Tensor | None, version: int = 0) -> None:
        # One object for as long as the gradient lives, so that it can be compared by identity.
        self.ref = None if gradient is None else weakref.ref(gradient)
        self.version = version if gradient is None else gradient._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        return self.ref is other.ref and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


NONE, NEVER = Version(None), Version(None, -1)


@dataclass
class Bucket:
    """Parameters of one dtype of one unit, exchanged as one tensor, one flag each behind them."""

    parameters: list[nn.Parameter]
    own_rows: ClassVar[bool] = False
    numel: int = 0
    known: list[Version] = field(default_factory=list)
    """The gradients as the last exchange left them."""
    packed: list[Version] = field(default_factory=list)
    """As they were when they were packed."""

    def __post_init__(self) -> None:
        self.dtype = self.parameters[0].dtype
        self.numel = sum(p.numel() for p in self.parameters)
        length = self.numel + len(self.parameters)
        self.nbytes = -(-length * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.known = [NEVER] * len(self.parameters)

    def versions(self) -> list[Version]:
        """Which gradients there are now, and how often they were written to."""
        return [Version(p.grad) for p in self.parameters]

    def start(self, flat: Tensor, ranks: Ranks) -> Any:
        """Begin the collective that sums what all ranks have packed."""
        return dist.all_reduce(flat, group=ranks.exchange, async_op=True)

    def pack(self, flat: Tensor, num_ranks: int) -> None:
        """Lay out this rank's share of the average, and which gradients it added to."""
        self.packed = self.versions()
        for p, view in zip(self.parameters, self._views(flat), strict=True):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
        flat[: self.numel].div_(num_ranks)  # before the sum, which may overflow in half precision
        flat[self.numel :] = 0
        changed = torch.tensor(self.changed(), dtype=flat.dtype, device="cpu")
        flat[self.numel : self.numel + len(changed)] = changed

    def unpack(self, flat: Tensor) -> None:
        """Take up the average where any rank has added to it; the rest stays, to the bit."""
        views = self._views(flat)
        changed = flat[self.numel : self.numel + len(self.parameters)].tolist()
        self._take_up(views, changed)

    def _take_up(self, views: list[Tensor], changed: list[float]) -> None:
        self.known = self.packed
        now = self.versions()
        for i, (p, view) in enumerate(zip(self.parameters, views, strict=True)):
            if not changed[i]:
                continue
            if now[i] == self.packed[i]:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                self._give(p, view)
                self.known[i] = Version(p.grad)
            elif (
                self.packed[i] == NONE and not self.own_rows
            ):  # what came since goes in another exchange
                assert p.grad is not None
                p.grad.add_(view)
                self.known[i] = NEVER
            else:
                raise RuntimeError(
                    f"autohete: a gradient of shape {tuple(p.shape)} was added to after its unit "
                    "had left backward, expected the order of the first backward; train with "
                    "plain DistributedDataParallel where weights change their places in the graph"
                )

    def step_taken(self) -> None:
        """A step has used the gradients."""

    def own_parts(self) -> list[tuple[Tensor, bool]]:
        """Return nothing: every rank has every gradient whole."""
        return []

    def _give(self, p: nn.Parameter, view: Tensor) -> None:
        assert p.grad is not None
        p.grad.copy_(view)

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = flat[: self.numel].split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def changed(self) -> list[bool]:
        """Which gradients this rank added to since the last exchange."""
        now = self.versions()
        return [n != NONE and n != k for n, k in zip(now, self.known, strict=True)]


@dataclass
class RowsBucket(Bucket):
    """The same where each rank gets the average of the rows that it updates, and of nothing else.

    Packed rank by rank, each with its rows of every parameter, what has no rows whole, and the
    flags. Other rows are NaN once they are averaged elsewhere.
    """

    rank: int = 0
    size: int = 1
    own_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = [rows_of(p, self.size) for p in self.parameters]
        self.lengths = [
            n * (p.numel() // len(p)) if n else p.numel()
            for p, n in zip(self.parameters, self.rows, strict=True)
        ]
        self.numel = sum(self.lengths)
        length = self.numel + len(self.parameters)
        self.segment = -(-length * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = 2 * self.size * self.segment  # what goes and what comes
        self.segment //= self.dtype.itemsize
        self.averaged = [False] * len(self.parameters)  # and not used by a step since

    def start(self, flat: Tensor, ranks: Ranks) -> Any:
        """Let every rank have its segment of all; summed by the backend, or in unpack()."""
        packed, came = flat.view(2, -1)
        if flat.device.type == "cpu":  # gloo would sum everything everywhere
            return dist.all_to_all_single(came, packed, group=ranks.exchange, async_op=True)
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(came[: self.segment], packed, group=ranks.exchange, async_op=True)

    def pack(self, flat: Tensor, num_ranks: int) -> None:
        """Lay out this rank's share of every rank's rows, and which gradients it added to."""
        self.packed = self.versions()
        self._refuse_a_second_exchange()
        segments = flat.view(2, self.size, self.segment)[0]
        for rank, segment in enumerate(segments):
            for i, view in enumerate(segment[: self.numel].split(self.lengths)):
                self._lay_out(i, rank, view)
        segments[:, : self.numel].div_(num_ranks)
        segments[:, self.numel :] = 0
        changed = torch.tensor(self.changed(), dtype=flat.dtype, device="cpu")
        segments[:, self.numel : self.numel + len(changed)] = changed.to(flat.device)

    def _lay_out(self, i: int, rank: int, view: Tensor) -> None:
        part = self._part(i, rank)
        if part is None:
            view.zero_()
            return
        view[: part.numel()].view(part.shape).copy_(part)
        view[part.numel() :].zero_()

    def _part(self, i: int, rank: int) -> Tensor | None:
        """The rows of a gradient that a rank averages."""
        gradient, n = self.parameters[i].grad, self.rows[i]
        if gradient is None or not n:
            return gradient
        begin = min(rank * n, len(gradient))
        return gradient[begin : min(begin + n, len(gradient))]

    def step_taken(self) -> None:
        """Gradients may be zeroed in place and made anew."""
        self.averaged = [False] * len(self.parameters)

    def own_parts(self) -> list[tuple[Tensor, bool]]:
        """Return what this rank has of each gradient, and whether it stands for itself only."""
        parts = [self._part(i, self.rank) for i in range(len(self.parameters))]
        first = self.rank == 0
        return [
            (part, bool(n) or first)
            for part, n in zip(parts, self.rows, strict=True)
            if part is not None
        ]

    def _refuse_a_second_exchange(self) -> None:
        for i, p in enumerate(self.parameters):
            known, packed = self.known[i], self.packed[i]
            if p.grad is None or known.ref is not packed.ref or known == packed:
                continue  # a new one, or nothing was added
            if self.averaged[i]:
                raise ValueError(
                    "backward: gradients were averaged already and are added to, and "
                    "whole_gradients is False, expected one exchange a step; use no_sync() for all "
                    "micro-batches but the last, and zero_grad() after each"
                )

    def unpack(self, flat: Tensor) -> None:
        """Take up the average of the own rows where any rank has added to it."""
        came = flat.view(2, self.size, self.segment)[1]
        total = came[0]
        if flat.device.type == "cpu":
            for other in came[1:]:
                total.add_(other)
        changed = total[self.numel : self.numel + len(self.parameters)].tolist()
        self._take_up(list(total[: self.numel].split(self.lengths)), changed)

    def _give(self, p: nn.Parameter, view: Tensor) -> None:
        i = next(i for i, q in enumerate(self.parameters) if q is p)
        own = self._part(i, self.rank)
        assert own is not None and p.grad is not None
        if self.rows[i]:
            p.grad.fill_(float("nan"))
            self.averaged[i] = True
        own.copy_(view[: own.numel()].view(own.shape))


def rows_of(parameter: Tensor, size: int) -> int:
    """Return how many rows of a parameter a rank has; 0: each has it whole, as the engine cuts."""
    whole = parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_contiguous()
    return 0 if whole else -(-len(parameter) // size)


def trained(unit: Unit) -> list[nn.Parameter]:
    return [p for p in unit.parameters if p.requires_grad and p.dtype.is_floating_point]


def buckets_of(unit: Unit, ranks: Ranks, own_rows: bool) -> list[Bucket]:
    """Return the unit's parameters that are trained, by dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained(unit):
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    if own_rows:
        return [RowsBucket(ps, rank=ranks.rank, size=ranks.size) for ps in by_dtype.values()]
    return [Bucket(parameters) for parameters in by_dtype.values()]
