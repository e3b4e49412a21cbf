"""Sizes in bytes: read what people write, write what people read."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*\Z")
_LARGEST = 2**53


def parse_bytes(size: int | float | str, name: str = "size") -> int:
    """Return a number of bytes from 40e9, "40GB" or "24GiB".

    Raises:
        ValueError: unknown unit, not a number, not finite, negative, beyond 2**53, or a small
            fraction without a unit.

    >>> parse_bytes("24GiB"), parse_bytes("40 gb"), parse_bytes(40e9)
    (25769803776, 40000000000, 40000000000)
    """
    given: Any = size
    if not isinstance(given, bool) and isinstance(given, numbers.Integral):
        size = int(given)  # NumPy's, say
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise ValueError(f"{name} is {size!r}, expected bytes or a string such as '24GiB'")
    number = _parse_text(size, name) if isinstance(size, str) else size
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{name} is {size!r}, expected a finite number of bytes")
    if number < 0 or number > _LARGEST:
        raise ValueError(f"{name} is {size!r}, expected between 0 and 2**53 bytes")
    if isinstance(size, float) and size < 1024 and not size.is_integer():  # GiB were meant
        raise ValueError(
            f"{name} is {size!r}, expected whole bytes; give a unit, for example '{size:g}GiB'"
        )
    return int(number)


def _parse_text(text: str, name: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"{name} is {text!r}, expected a size such as '24GiB' or '40GB'")
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{name} is {text!r}: unknown unit {unit!r}, expected one of B, kB, MB, GB, TB "
            "(powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
        )
    return float(number) * _UNITS[unit.lower()]


def format_bytes(size: float) -> str:
    """Write a size with a binary unit and three digits.

    >>> format_bytes(25769803776), format_bytes(1536), format_bytes(12)
    ('24.0 GiB', '1.50 KiB', '12 B')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.5 or unit == "PiB":
            break
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"
