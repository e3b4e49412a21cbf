"""Pictures in files and inline: PNG, SVG and PDF without a browser, through vl-convert."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autohete.report.style import INHERIT, LIGHT_TEXT, vega_config

if TYPE_CHECKING:
    from autohete.report.charts import Spec

_FORMATS = (".svg", ".png", ".pdf")
_WIDTH = 640


def svg_text(spec: Spec, *, width: int = _WIDTH) -> str:
    """Return an inline SVG that takes the colour of the text around it and shrinks with it."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(
        _sized(spec, width), config=vega_config(INHERIT, background=None), vl_version=version(spec)
    )
    opening = 'style="max-width:100%;height:auto" role="img" '
    return re.sub(r"<svg ", f"<svg {opening}", svg, count=1)


def save_picture(path: str | os.PathLike[str], specs: dict[str, Spec]) -> None:
    """Write the figures, one under another with their titles, to a .svg, .png or .pdf file.

    Raises:
        ValueError: the name ends in something else.
    """
    import vl_convert

    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise ValueError(
            f"figure: the file is {target.name!r}, expected a name that ends in "
            f"{', '.join(_FORMATS)}; the ending chooses the format"
        )
    page = _stacked(specs)
    options: dict[str, Any] = {
        "config": vega_config(LIGHT_TEXT, background="white"),
        "vl_version": version(page),
    }
    if target.suffix.lower() == ".svg":
        target.write_text(vl_convert.vegalite_to_svg(page, **options), encoding="utf-8")
    elif target.suffix.lower() == ".pdf":
        target.write_bytes(vl_convert.vegalite_to_pdf(page, **options))
    else:
        target.write_bytes(vl_convert.vegalite_to_png(page, scale=2, **options))


def version(spec: Spec) -> str:
    """Return the Vega-Lite version of a specification, as "6.1"."""
    found = re.search(r"/v(\d+\.\d+)", spec["$schema"])
    assert found is not None
    return found[1]


def _sized(spec: Spec, width: int) -> Spec:
    return {**spec, "width": width}


def _stacked(specs: dict[str, Spec]) -> Spec:
    """One specification with the figures under each other; their colours stay their own."""
    parts = [{**_sized(spec, _WIDTH), "title": title} for title, spec in specs.items()]
    schema = next(iter(specs.values()))["$schema"]
    for part in parts:
        part.pop("$schema", None)
    return {
        "$schema": schema,
        "vconcat": parts,
        "resolve": {
            "scale": dict.fromkeys(("color", "shape", "strokeDash"), "independent"),
            "legend": dict.fromkeys(("color", "shape", "strokeDash"), "independent"),
        },
    }
