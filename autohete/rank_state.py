"""What a rank has of an optimizer's state, as torch shows and takes parts of a whole: DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autohete.guard import settle_guarded


class StatePart(DTensor):
    """A DTensor that waits for its rows, and cannot be pickled.

    DTensor hands its rows to operators in C++, where the guard that they wear is not asked; so it
    is asked first. A pickled one would be one rank's rows, and not say so.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        settle_guarded(func, list(_rows_in((*args, *kwargs.values()))))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "optimizer.state_dict(): of several ranks each has only its rows of the state, "
            "expected a way to save that knows of parts; use model.save_checkpoint() on all ranks, "
            "or torch.distributed.checkpoint"
        )


def _rows_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, StatePart):
            yield value._local_tensor
        elif isinstance(value, (list, tuple)):
            yield from _rows_in(value)


def shown_whole(part: Tensor, parameter: Tensor, mesh: Any) -> DTensor:
    """Return this rank's rows of something shaped like `parameter` as the whole, sharded.

    It holds `part` itself, no view of it.
    """
    placeholder = torch.empty_like(part, memory_format=torch.contiguous_format)
    whole = DTensor.from_local(
        placeholder,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    whole._local_tensor = part
    whole.__class__ = StatePart
    return whole


def local_of(value: DTensor) -> Tensor:
    """Return what a rank has of a sharded state, or all where it is cut otherwise than ours."""
    with torch.no_grad():
        as_ours = value.device_mesh.ndim == 1 and value.placements == (Shard(0),)
        return value.to_local() if as_ours else value.full_tensor()
