"""How commands show things: tables and colours on a terminal, plain text in a pipe or a file.

NO_COLOR and FORCE_COLOR are honoured (rich does that). Errors and progress go to stderr, so that
what is on stdout can be read by a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Print strict JSON: no NaN, which not every reader takes."""
    print(json.dumps(value, indent=1, allow_nan=False))


def print_rows(
    title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = (), *, err: bool = False
) -> None:
    """Print rows of text: a table on a terminal, else one line a row with aligned columns."""
    lines = [tuple(row) for row in rows]
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        print("\n".join([title, *_plain(lines, header)]), file=stream)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = box.SIMPLE_HEAD if header else box.SIMPLE
    table = Table(title=title, box=style, show_header=bool(header), title_justify="left")
    for i in range(max((len(row) for row in lines), default=len(header))):
        table.add_column(header[i] if i < len(header) else "", overflow="fold")
    for row in lines:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console(stderr=err).print(table)


_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def _plain(rows: list[tuple[str, ...]], header: Sequence[str]) -> list[str]:
    lines = [tuple(header), *rows] if header else rows
    widths = [
        max((len(line[i]) for line in lines if i < len(line)), default=0)
        for i in range(max((len(line) for line in lines), default=0))
    ]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in lines
    ]


def console(*, err: bool = False) -> Console:
    """Return a console; rich sees by itself whether it is a terminal."""
    from rich.console import Console

    return Console(stderr=err)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something goes on that may take over two seconds."""
    if not sys.stderr.isatty():
        yield
        return
    with console(err=True).status(text):
        yield
