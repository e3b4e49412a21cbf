"""What a CPU optimizer hands on: an update that was read, and who makes it if not step() itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Beside", "ReadUpdate"]


class ReadUpdate(NamedTuple):
    """One parameter's update, read and checked, its state complete; nothing is updated yet."""

    param: Tensor
    group: int
    values: tuple[Any, ...] | None
    """As the native call takes it; None without a gradient."""

    after: list[Callable[[], Any]]
    """What is to be done when the update has been made."""


class Beside(Protocol):
    """Makes an optimizer's updates beside what follows step()."""

    def take(self, hypers: list[Any]) -> None:
        """Begin the updates of this step."""

    def synchronize(self) -> None:
        """Wait until all that began are made; raise what one of them, or an earlier one, raised."""

    def wait(self) -> None:
        """The same, but raise only what has not been raised before."""

    def loaded(self) -> None:
        """The state is a checkpoint's: what an update raised before is over."""
