"""The text: the sources of Python's own standard library. Real, on every machine, no download."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Of the whole, tests and data tables would be most.
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings"}
_EVERY_NTH_FILE_HELD_OUT = 10


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes never learned from; no file is in both."""

    training: Tensor  # uint8, one dimension
    held_out: Tensor


def standard_library_text(max_bytes: int = 4_000_000) -> Text:
    """Read the sources, the same ones in the same order for one version of Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = bytearray(), bytearray()
    for number, file in enumerate(_sources(root)):
        if len(training) + len(held_out) >= max_bytes:
            break
        part = held_out if number % _EVERY_NTH_FILE_HELD_OUT == 0 else training
        part += file.read_bytes()
    if len(training) < 100_000:
        raise RuntimeError(
            f"demo: {root} holds {len(training)} bytes of Python sources, expected 100000 or more; "
            "use a Python whose standard library is not packed away"
        )
    return Text(
        torch.frombuffer(training, dtype=torch.uint8),
        torch.frombuffer(held_out, dtype=torch.uint8),
    )


def batches(
    text: Tensor, *, batch: int, context: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), both [batch, context] int64, from random places of `text`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)].long()
        yield window[:, :-1], window[:, 1:]


def _sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.parts))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
