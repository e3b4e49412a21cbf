"""Numbers of a param group, checked."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

__all__ = [
    "check_betas",
    "check_not_negative",
    "inverse_scale",
    "number",
    "two_betas",
    "whole_number",
]


def number(where: str, name: str, value: float | Tensor) -> float:
    """Return a hyper-parameter that may be a one-element tensor."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{where}: {name} has {value.numel()} elements, expected one")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {name} is {value!r}, expected a number") from None


def whole_number(where: str, name: str, value: Any) -> int:
    """Return an argument that counts something."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{where}: {name} is {value!r}, expected a whole number") from None


def two_betas(where: str, betas: Any) -> tuple[float, float]:
    """Return both betas; each may be a one-element tensor."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{where}: betas is {betas!r}, expected two numbers")
    return number(where, "betas", betas[0]), number(where, "betas", betas[1])


def inverse_scale(where: str, scale: Any) -> float:
    """Return what gradients are multiplied by to undo a scaler's factor."""
    factor = number(where, "grad_scale", scale)
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"{where}: grad_scale is {factor}, expected a finite number > 0")
    return 1.0 / factor


def check_not_negative(where: str, group: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError where one is not a finite number >= 0."""
    for name in names:
        value = number(where, name, group[name])
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{where}: {name} is {value}, expected a finite number >= 0")


def check_betas(where: str, group: dict[str, Any]) -> None:
    """Raise ValueError where one is not in [0, 1)."""
    for i, beta in enumerate(two_betas(where, group["betas"])):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{where}: betas[{i}] is {beta}, expected 0 <= beta < 1")
