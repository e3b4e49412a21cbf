"""Figures are legible in grey, on white and on black."""

from __future__ import annotations

import itertools

import pytest

from autohete.report import style

# What can stand side by side: the work of one lane, the places of one strip, the lines of a figure.
NEIGHBOURS = {
    "the compute lane": [
        style.WORK[w] for w in ("forward", "recompute", "backward", "exchange", "update", "wait")
    ],
    "the strip": list(style.PLACES.values()),
    "the memory lines": list(style.SERIES.values()),
}


@pytest.mark.parametrize("group", NEIGHBOURS)
def test_neighbours_differ_in_luminance_so_grey_tells_them_apart(group: str) -> None:
    for one, other in itertools.combinations(NEIGHBOURS[group], 2):
        assert style.contrast(one, other) >= style.LEAST_CONTRAST, (one, other)


@pytest.mark.parametrize("page", ["#ffffff", "#15181e"])
def test_outlines_and_limits_stand_out_on_white_and_on_black(page: str) -> None:
    for colour in (style.OUTLINE, style.LIMIT):
        assert style.contrast(colour, page) >= 3, colour


def test_text_is_readable_on_its_page() -> None:
    assert style.contrast(style.LIGHT_TEXT, "#ffffff") >= 7
    assert style.contrast(style.DARK_TEXT, "#15181e") >= 7


def test_lines_differ_in_dashes_too() -> None:
    dashes = [tuple(dash) for dash in style.DASHES.values()]
    assert len(set(dashes)) == len(style.SERIES)
