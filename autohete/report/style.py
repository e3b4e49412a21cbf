"""Colours and chart settings, for light and dark pages, legible in grey.

Colours that can stand next to each other differ in luminance by `LEAST_CONTRAST`, so they can be
told apart without hue; every mark has an outline that stands out on white and on black.
"""

from __future__ import annotations

from typing import Any

LEAST_CONTRAST = 1.3

WORK = {
    "forward": "#a6d4f2",
    "recompute": "#e8a13a",
    "backward": "#3f8ecb",
    "update": "#8a5a2b",
    "upload": "#5fb596",
    "download": "#c77fae",
    "exchange": "#21503c",
    "gather": "#d9d27a",
    "wait": "#402b52",
}
"""What a lane does -> colour."""

PLACES = {"device": "#2c6ca8", "host": "#f0b95b", "recomputed": "#b07aa1", "nothing": "#f2f2f2"}
"""Where bytes are -> colour."""

SERIES = {"predicted": "#d98c21", "measured": "#2c6ca8"}
DASHES = {"predicted": [6, 3], "measured": [1, 0]}
LIMIT = "#c8553d"
OUTLINE = "#7a7a7a"

INHERIT = "currentColor"  # of the page around an inline picture
LIGHT_TEXT, DARK_TEXT = "#1f2430", "#e6e6e6"


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", 0 to 1 (WCAG 2).

    >>> luminance("#ffffff"), luminance("#000000")
    (1.0, 0.0)
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return round(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2], 6)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def vega_config(text: str, background: str | None = None) -> dict[str, Any]:
    """Return the Vega-Lite configuration for text of a colour; None: a transparent background."""
    words = {"labelColor": text, "titleColor": text, "labelFontSize": 11, "titleFontSize": 12}
    return {
        "background": background,
        "font": "system-ui, 'DejaVu Sans', 'Liberation Sans', sans-serif",
        "view": {"stroke": None},
        "axis": {
            **words,
            "titleFontWeight": "normal",
            "gridColor": OUTLINE,
            "gridOpacity": 0.25,
            "domainColor": OUTLINE,
            "tickColor": OUTLINE,
        },
        "legend": {**words, "titleFontWeight": "normal", "orient": "bottom", "columns": 4},
        "title": {"color": text, "anchor": "start", "fontSize": 13},
        "text": {"color": text},
    }
