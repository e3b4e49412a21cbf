"""One self-contained HTML page: facts, the figures interactive, the plan as a table.

No network is needed to read it: the drawing library is inside. Light and dark follow the reader's
system until the button is pressed; without scripts the facts and the table are still there.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import os
import re
from functools import cache
from pathlib import Path

from autohete._version import __version__
from autohete.planning.profile_file import write_atomically
from autohete.planning.table import plan_rows
from autohete.report.content import Content
from autohete.report.style import DARK_TEXT, LIGHT_TEXT, vega_config

_NOTES = {
    "What lives where": "One column per unit. Point at a cell for its name and size.",
    "Device memory over one step": "Steps at the borders of units; the dotted line is the limit.",
    "Host memory over one step": "Host blocks are allocated once, so the level hardly changes.",
    "The lanes over two steps": "Drag to move, hold Shift and turn the wheel to zoom, double-click "
    "to go back. Click a word in the legend to see that work alone.",
    "Tokens per second by batch": "Simulated; up to the largest batch that fits.",
    "Tokens per second by device memory": "Simulated; from the least memory that fits.",
}


def write_page(path: str | os.PathLike[str], content: Content) -> None:
    """Write the page.

    Raises:
        RuntimeError: the plotting library is missing.
    """
    write_atomically(Path(path), page(content))


def page(content: Content) -> str:
    """Return the page as text."""
    figures = content.figures()
    themes = {"light": vega_config(LIGHT_TEXT), "dark": vega_config(DARK_TEXT)}
    data = json.dumps({"figures": list(figures.values()), "themes": themes}, allow_nan=False)
    fill = {
        "TITLE": html.escape(content.title),
        "FACTS": "\n".join(_fact(*fact) for fact in content.facts),
        "FIGURES": "\n".join(_figure(i, title) for i, title in enumerate(figures)),
        "PLAN": _plan_table(content),
        "VERSION": html.escape(__version__),
        "DATA": data.replace("</", "<\\/"),  # a name cannot end the script
        "LIBRARY": _library(),
    }
    text = importlib.resources.files("autohete.report").joinpath("page.html").read_text("utf-8")
    return re.sub(r"@([A-Z]+)@", lambda place: fill[place[1]], text)  # once: data is not looked at


def _fact(what: str, figure: str) -> str:
    return f"<div><dt>{html.escape(what)}</dt><dd>{html.escape(figure)}</dd></div>"


def _figure(index: int, title: str) -> str:
    note = html.escape(_NOTES.get(title, ""))
    return (
        f'<section aria-labelledby="t{index}"><h2 id="t{index}">{html.escape(title)}</h2>'
        f'<p class="note">{note}</p><div class="figure" id="f{index}"></div></section>'
    )


def _plan_table(content: Content) -> str:
    if content.plan is None:
        return ""
    head = "".join(
        f"<th>{word}</th>" for word in ("units", "number", "activations", "parameters", "optimizer")
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(cell)}</td>"
            for cell in (
                row.names,
                str(row.count),
                "recomputed" if row.checkpointed else "kept",
                row.parameters,
                row.optimizer,
            )
        )
        + "</tr>"
        for row in plan_rows(content.plan, content.profile)
    )
    return (
        "<section><details open><summary>The plan as a table</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></details></section>"
    )


@cache
def _library() -> str:
    """Vega, Vega-Lite and their embedding as one script, as vl-convert ships them."""
    import vl_convert

    script: str = vl_convert.javascript_bundle(vl_version=_bundled_version())  # type: ignore[call-arg]
    return script.replace("</script", "<\\/script")


def _bundled_version() -> str:
    import altair

    major_minor = altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2]
    return ".".join(major_minor)
