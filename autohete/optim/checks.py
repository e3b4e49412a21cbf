"""Numbers of a param group, checked."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["check_betas", "check_not_negative", "number"]


def number(where: str, name: str, value: float | Tensor) -> float:
    """Return a hyper-parameter that may be a one-element tensor."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{where}: {name} has {value.numel()} elements, expected one")
    return float(value)


def check_not_negative(where: str, group: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError where one is not a finite number >= 0."""
    for name in names:
        value = number(where, name, group[name])
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{where}: {name} is {value}, expected a finite number >= 0")


def check_betas(where: str, group: dict[str, Any]) -> None:
    """Raise ValueError where one is not in [0, 1)."""
    for i, beta in enumerate(group["betas"]):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"{where}: betas[{i}] is {float(beta)}, expected 0 <= beta < 1")
