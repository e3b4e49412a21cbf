"""How far a command's steps are, and how long the rest may take: on stderr, beside results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import median
from types import TracebackType
from typing import Any


def ends_a_tenth(step: int, steps: int) -> bool:
    """Whether a tenth of the way is done after this step, the first being 0."""
    return (step + 1) * 10 // steps > step * 10 // steps


class Steps:
    """A bar on a terminal; elsewhere a line for every tenth of the steps.

    Enter it before what is to be seen; until the first step it shows that something goes on.
    """

    def __init__(self, title: str, steps: int) -> None:
        self._title = title
        self._steps = steps
        self._done = 0
        self._last_ended = 0.0
        self._seconds: list[float] = []  # of the steps, the first one left out
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as Remaining

            text = TextColumn("{task.description}")
            columns = (text, BarColumn(), MofNCompleteColumn(), Remaining())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=steps)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, title: str | None = None) -> None:
        """One step more is done, of what `title` says from now on."""
        now = time.perf_counter()
        self._title = title or self._title
        self._done += 1
        if self._done > 1:
            self._seconds.append(now - self._last_ended)
        self._last_ended = now
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=self._title)
        elif ends_a_tenth(self._done - 1, self._steps):
            line = f"{self._title}: step {self._done} of {self._steps}{self._to_go()}"
            print(line, file=sys.stderr, flush=True)

    def _to_go(self) -> str:
        """Some steps are not like the others: the first is measured, the next changes the plan."""
        left = self._steps - self._done
        if not self._seconds or left == 0:
            return ""
        return f", {about(median(self._seconds) * left)} to go"


def steps_shown(title: str, steps: int) -> Iterator[int]:
    """Count the steps of a loop and show how far it is."""
    with Steps(title, steps) as shown:
        for step in range(steps):
            yield step
            shown.done()


def about(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 1:
        return "less than 1 s"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
