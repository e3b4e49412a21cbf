"""The figures, drawn from the rows of rows.py with Altair: one Vega-Lite specification each.

The same specification is a picture in a file, inline in a notebook and interactive in a page.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from autohete.report.rows import LANES, Row
from autohete.report.style import DASHES, LIMIT, OUTLINE, PLACES, SERIES, WORK

Spec = dict[str, Any]
_KINDS = ("parameters", "gradients", "optimizer state", "activations")


def placement_chart(rows: list[Row]) -> Spec:
    """Draw a strip per kind of bytes: where each unit's are."""
    present = [place for place in PLACES if any(row["where"] == place for row in rows)]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(stroke=OUTLINE, strokeWidth=0.4)
        .encode(
            x=alt.X(
                "unit:Q",
                title="units in forward order",
                scale=alt.Scale(nice=False),
                axis=_axis(format="d", tickMinStep=1, grid=False),
            ),
            x2="end:Q",
            y=alt.Y("bytes of:N", sort=list(_KINDS), title=None, axis=alt.Axis(labelLimit=110)),
            color=_colour("where", {place: PLACES[place] for place in present}),
            tooltip=_tooltips("name", "bytes of", "where", "size"),
        )
    )
    return _spec(chart, height=4 * 26)


def memory_chart(rows: list[Row], limit_bytes: int | None, where: str) -> Spec:
    """Draw bytes in use over one step as steps, with the limit as a line."""
    unit, scale = _unit(max(limit_bytes or 0, *(row["bytes"] for row in rows)))
    rows = [{**row, unit: row["bytes"] / scale} for row in rows]
    which = [name for name in SERIES if any(row["which"] == name for row in rows)]
    exact = alt.Scale(nice=False)
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X("ms:Q", title="milliseconds of one step", scale=exact, axis=_axis()),
            y=alt.Y(f"{unit}:Q", title=f"{unit} {where}", scale=alt.Scale(zero=True)),
            color=_colour("which", {name: SERIES[name] for name in which}),
            strokeDash=alt.StrokeDash(
                "which:N",
                title=None,
                scale=alt.Scale(domain=which, range=[DASHES[name] for name in which]),
            ),
            tooltip=_tooltips("which", "ms", "size"),
        )
    )
    if limit_bytes is None:
        return _spec(lines, height=150)
    level = alt.Data(values=[{"limit": limit_bytes / scale, "label": "limit"}])
    rule = (
        alt.Chart(level)
        .mark_rule(color=LIMIT, strokeWidth=2, strokeDash=[2, 2])
        .encode(y="limit:Q")
    )
    text = (
        alt.Chart(level)
        .mark_text(align="left", baseline="bottom", dx=4, dy=-2)
        .encode(y="limit:Q", x=alt.value(0), text="label:N")
    )
    return _spec(alt.layer(lines, rule, text), height=150)


def timeline_chart(rows: list[Row]) -> Spec:
    """Draw the lanes over some steps, predicted under measured where both are there."""
    work = [name for name in WORK if any(row["work"] == name for row in rows)]
    which = [name for name in ("measured", "predicted") if any(r["which"] == name for r in rows)]
    lanes = [lane for lane in LANES if any(row["lane"] == lane for row in rows)]
    chosen = alt.selection_point(name="chosen", fields=["work"], bind="legend")
    moved = alt.selection_interval(
        name="moved", bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]"
    )
    offset: dict[str, Any] = {}
    if len(which) > 1:
        offset["yOffset"] = alt.YOffset("which:N", sort=which)
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(stroke=OUTLINE, strokeWidth=0.2)
        .encode(
            x=alt.X("begin:Q", title="milliseconds", scale=alt.Scale(nice=False), axis=_axis()),
            x2="end:Q",
            y=alt.Y("lane:N", sort=lanes, title=None, axis=alt.Axis(labelLimit=110)),
            color=_colour("work", {name: WORK[name] for name in work}),
            opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.12)),
            tooltip=_tooltips("which", "lane", "work", "units", "begin", "took"),
            **offset,
        )
        .add_params(chosen, moved)
    )
    return _spec(chart, height=len(lanes) * (28 if len(which) < 2 else 44))


def sweep_chart(rows: list[Row], title: str, *, doubling: bool = False) -> Spec:
    """Draw tokens per second against batch or memory; what does not fit is missing."""
    scale = alt.Scale(type="log", base=2, nice=False) if doubling else alt.Scale(zero=False)
    axis = _axis(values=[row["x"] for row in rows]) if doubling else _axis(format="~g")
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("x:Q", title=title, scale=scale, axis=axis),
        y=alt.Y("tokens per second:Q", axis=alt.Axis(format="~s")),
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        color=_colour("bound by", _LANE_COLOURS, title="bound by"),
        shape=alt.Shape(
            "bound by:N", scale=alt.Scale(domain=list(_LANE_COLOURS)), title="bound by"
        ),
        tooltip=_tooltips(
            "label", "tokens per second", "step", "MFU", "device", "host", "bound by"
        ),
    )
    line = base.mark_line(color=OUTLINE)
    return _spec(alt.layer(line, points), height=190)


_LANE_WORK = ("backward", "upload", "download", "update", "exchange", "gather")
_LANE_COLOURS = dict(zip(LANES, (WORK[w] for w in _LANE_WORK), strict=True))


def _unit(largest: int) -> tuple[str, int]:
    """The binary unit to show sizes up to `largest` in."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return unit, int(1024**power)
    return "B", 1


def _axis(**options: Any) -> alt.Axis:
    """An axis whose labels leave room between them on a narrow page."""
    return alt.Axis(labelOverlap="greedy", labelSeparation=8, **options)


def _colour(field: str, colours: dict[str, str], title: str | None = None) -> alt.Color:
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", scale=scale, title=title)


def _tooltips(*fields: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(field=field, type="nominal", title=field) for field in fields]


def _spec(chart: Any, height: int) -> Spec:
    spec: Spec = chart.properties(width="container", height=height).to_dict()
    spec.pop("config", None)  # ours is given when it is drawn, for the page's theme
    return spec
