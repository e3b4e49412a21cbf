"""What options take: sizes, machines, models, strategies and files to write.

A value that is none of these is a wrong command line: exit code 2, before anything is done. What is
looked up is imported when a value is there, so that `--help` needs no torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


@contextmanager
def of_the_command_line() -> Iterator[None]:
    """Turn a ValueError about what was typed into click's own error, with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from None


class Size(click.ParamType[Any]):
    """Bytes, or text such as "24GiB"; becomes a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from autohete.planning.sizes import parse_bytes

        with of_the_command_line():
            return parse_bytes(value, param.opts[0] if param else "size")


class KnownMachine(click.ParamType[Any]):
    """A machine of the library, by name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from autohete.planning.library import MACHINES, known_name

        try:
            return known_name(value)
        except ValueError:
            self.fail(f"{value!r} is not known, expected one of {', '.join(MACHINES)}", param, ctx)


class KnownStrategy(click.ParamType[Any]):
    """A strategy, by name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from autohete.planning import STRATEGIES

        if value not in STRATEGIES:
            self.fail(
                f"{value!r} is not known, expected one of {', '.join(STRATEGIES)}", param, ctx
            )
        return str(value)


class Model(click.ParamType[Any]):
    """A preset such as 7b, or a config.json."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from autohete.planning.named_model import PRESETS

        if value in PRESETS or Path(value).is_file():
            return str(value)
        if Path(value).suffix or "/" in value:
            self.fail(f"there is no file {value}", param, ctx)
        self.fail(
            f"{value!r} is not known, expected a config.json or one of {', '.join(PRESETS)}",
            param,
            ctx,
        )


class NewFile(click.Path):
    """A file that can be written, so that nobody works for a minute to be refused at the end."""

    def __init__(self, endings: Sequence[str] = ()) -> None:
        super().__init__(dir_okay=False)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self._endings and path.suffix.lower() not in self._endings:
            self.fail(
                f"{path.name!r} expected to end in {', '.join(self._endings)}; the ending chooses "
                "the format",
                param,
                ctx,
            )
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            self.fail(
                f"{path} cannot be written: {error.strerror}, in {path.parent.resolve()}; give "
                "another path",
                param,
                ctx,
            )
        return value


SIZE = Size()
MACHINE = KnownMachine()
STRATEGY = KnownStrategy()
MODEL = Model()
NEW_FILE = NewFile()
PICTURE = NewFile((".svg", ".png", ".pdf"))
