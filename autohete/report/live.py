"""Progress that changes in place: a line on a terminal, a bar and figures in a notebook.

with Live(total=100) as live:
    for step in range(100):
        ...
        live.step(loss=loss.item(), **model.metrics())
"""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from autohete.planning.sizes import format_bytes

_SHOWN = {
    "autohete/device_peak_measured_bytes": "device memory",
    "autohete/step_seconds_last": "last step",
    "autohete/waited_seconds": "waited so far",
}
_LEAST_SECONDS = 0.2  # between two changes of what is shown


class Live:
    """Shows how far a loop is and the newest figures; costs nothing where nobody looks."""

    def __init__(self, total: int, title: str = "training") -> None:
        if total < 1:
            raise ValueError(f"Live: total is {total}, expected the number of steps, 1 or more")
        self.total, self.title, self.done = total, title, 0
        self._figures: dict[str, float] = {}
        self._begin = self._shown_at = 0.0
        self._handle: Any = None
        self._notebook = in_notebook()

    def __enter__(self) -> Live:
        self._begin = time.perf_counter()
        self._show()
        return self

    def __exit__(self, *error: object) -> None:
        self._show()
        if not self._notebook and sys.stderr.isatty():
            print(file=sys.stderr)

    def step(self, **figures: float) -> None:
        """One step is done; figures are shown by their names, those of metrics() in words."""
        self.done += 1
        self._figures = figures
        if time.perf_counter() - self._shown_at > _LEAST_SECONDS:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.perf_counter()
        if self._notebook:
            self._show_in_notebook()
        elif sys.stderr.isatty():
            print(f"\r\x1b[K{self.text()}", end="", file=sys.stderr, flush=True)

    def _show_in_notebook(self) -> None:
        from IPython.display import HTML, display

        shown = HTML(self.html())
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def facts(self) -> list[tuple[str, str]]:
        """Return what is shown beside the bar."""
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        facts = [
            ("steps", f"{self.done}/{self.total}"),
            ("per second", f"{self.done / seconds:.2f}"),
        ]
        for name, value in self._figures.items():
            if name in _SHOWN:
                facts.append((_SHOWN[name], _in_words(name, value)))
            elif "/" not in name:
                facts.append((name, f"{value:.4g}"))
        return facts

    def text(self) -> str:
        """Return one line for a terminal."""
        return f"{self.title}: " + ", ".join(f"{what} {figure}" for what, figure in self.facts())

    def html(self) -> str:
        """Return a bar and the facts for a notebook."""
        facts = "".join(
            f"<td><small>{html.escape(what)}</small><br>{html.escape(figure)}</td>"
            for what, figure in self.facts()
        )
        bar = f'<progress value="{self.done}" max="{self.total}" style="width:100%"></progress>'
        return f"<div>{html.escape(self.title)}{bar}<table><tr>{facts}</tr></table></div>"


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


def _in_words(name: str, value: float) -> str:
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.3g} s"
