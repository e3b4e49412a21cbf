"""The same figures as files, inline in notebooks, and with a clear word where nothing can draw."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autohete.planning import Plan, simulate
from autohete.planning.plan_report import PlanReport
from autohete.report import content
from autohete.report.pictures import save_picture, svg_text
from autohete.run_report import RunReport

TITLES_OF_A_PLAN = [content.PLACEMENT, content.DEVICE, content.HOST, content.TIMELINE]


def test_a_plan_with_its_profile_has_four_figures(planned: PlanReport) -> None:
    assert list(content.content_of_plan_report(planned).figures()) == TITLES_OF_A_PLAN


def test_a_run_shows_predicted_under_measured(traced: RunReport) -> None:
    figures = content.content_of_run(traced).figures()
    assert list(figures) == TITLES_OF_A_PLAN
    rows = (
        next(iter(figures[content.TIMELINE]["datasets"].values()))
        if ("datasets" in figures[content.TIMELINE])
        else figures[content.TIMELINE]["data"]["values"]
    )
    assert {row["which"] for row in rows} == {"measured", "predicted"}
    assert figures[content.TIMELINE]["encoding"]["yOffset"]["sort"] == ["measured", "predicted"]


@pytest.mark.parametrize(
    ("ending", "magic"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF")]
)
def test_figures_are_written_in_each_format(
    planned: PlanReport, tmp_path: Path, ending: str, magic: bytes
) -> None:
    path = tmp_path / f"plan{ending}"
    save_picture(path, content.content_of_plan_report(planned).figures())
    assert path.read_bytes().startswith(magic)


def test_a_picture_names_its_figures_and_is_well_formed(
    planned: PlanReport, tmp_path: Path
) -> None:
    path = tmp_path / "plan.svg"
    save_picture(path, content.content_of_plan_report(planned).figures())
    texts = [element.text for element in ElementTree.parse(path).iter() if element.text]
    for title in TITLES_OF_A_PLAN:
        assert title in texts


def test_an_inline_picture_takes_the_pages_colour_and_shrinks(planned: PlanReport) -> None:
    svg = svg_text(content.content_of_plan_report(planned).figures()[content.TIMELINE])
    assert "currentColor" in svg
    assert "max-width:100%" in svg
    assert 'fill="white"' not in svg


def test_a_name_with_another_ending_is_refused(planned: PlanReport, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"figure: the file is 'plan.bmp', expected .*\.svg"):
        save_picture(tmp_path / "plan.bmp", content.content_of_plan_report(planned).figures())


# ---------------------------------------------------------------- notebooks


def test_plan_simulation_and_report_show_themselves_in_a_notebook(
    planned: PlanReport, traced: RunReport
) -> None:
    simulation = simulate(planned.profile, planned.plan)
    shown = {
        "answer": planned._repr_html_(),
        "plan": planned.plan._repr_html_(),  # type: ignore[attr-defined]
        "simulation": simulation._repr_html_(),  # type: ignore[attr-defined]
        "report": traced._repr_html_(),
    }
    for name, html in shown.items():
        assert "<svg" in html, name
        assert "<script" not in html, name
    assert content.PLACEMENT in shown["plan"]
    assert content.DEVICE in shown["answer"]
    assert content.TIMELINE in shown["simulation"]
    assert content.DEVICE in shown["report"]


def test_a_plan_by_hand_shows_itself_too() -> None:
    assert "strategy" in Plan()._repr_html_()  # type: ignore[attr-defined]


def test_without_the_plotting_library_the_table_is_there_and_says_what_to_install(
    planned: PlanReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    html = planned.plan._repr_html_()  # type: ignore[attr-defined]
    assert "recomputed" in html
    assert "pip install" in html
    assert "<svg" not in html
    with pytest.raises(RuntimeError, match="pip install altair vl-convert-python"):
        content.content_of_plan_report(planned).figures()
