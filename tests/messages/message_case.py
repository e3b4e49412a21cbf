"""One error message: what brings it about, and the parts that it must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """`trigger` gets an empty folder. The three parts are looked for in the message.

    Where only some values are possible, naming them says both what is wanted and what to do.
    """

    trigger: Callable[[Path], Any]
    got: str
    wanted: str
    do: str
    kind: type[BaseException] = ValueError
