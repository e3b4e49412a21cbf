"""The page as a reader sees it: opened, measured and clicked through in a headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autohete.planning.plan_report import PlanReport
from autohete.planning.sweep import sweep_batch, sweep_gpu_mem
from autohete.report.content import content_of_plan_report, content_of_run
from autohete.report.page import write_page
from autohete.run_report import RunReport

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

# Rectangles of texts and blocks that lie over each other by more than a pixel.
OVERLAPS = """() => {
  const seen = [];
  const add = (e, group) => {
    const r = e.getBoundingClientRect();
    if (r.width && r.height) seen.push({group, text: (e.textContent || "").slice(0, 40), r});
  };
  document.querySelectorAll(".figure").forEach((f, i) =>
    f.querySelectorAll("text").forEach(t => {
      if (t.textContent.trim() && getComputedStyle(t).opacity !== "0") add(t, "figure " + i);
    }));
  document.querySelectorAll("header > *").forEach(e => add(e, "header"));
  document.querySelectorAll("dl > div").forEach(e => add(e, "facts"));
  document.querySelectorAll("main > section").forEach(e => add(e, "sections"));
  document.querySelectorAll("td, th").forEach(e => add(e, "table"));
  const found = [];
  for (let i = 0; i < seen.length; i++) for (let j = i + 1; j < seen.length; j++) {
    const a = seen[i], b = seen[j];
    if (a.group !== b.group) continue;
    const w = Math.min(a.r.right, b.r.right) - Math.max(a.r.left, b.r.left);
    const h = Math.min(a.r.bottom, b.r.bottom) - Math.max(a.r.top, b.r.top);
    if (w > 1 && h > 1) found.push([a.group, a.text, b.text, w, h]);
  }
  return found;
}"""
OUTSIDE = """() => [...document.querySelectorAll("text, dd, dt, td, h1, h2, button")]
  .filter(e => getComputedStyle(e).opacity !== "0")
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is on the PATH; apt-get install chromium")
    with playwright.sync_playwright() as tool:
        started = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(
    planned: PlanReport, traced: RunReport, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plan = content_of_plan_report(planned)
    plan.batches = sweep_batch("gpt2", "a100-40", 512, gpu_mem="3GiB")
    plan.budgets = sweep_gpu_mem("gpt2", "a100-40", 4, 512, gpu_mem="6GiB")
    write_page(folder / "plan.html", plan)
    write_page(folder / "run.html", content_of_run(traced, "a run"))
    return {name: folder / f"{name}.html" for name in ("plan", "run")}


class Opened:
    """One open page, and what it complained about or asked the network for."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(f"body[data-drawn={scheme}]")

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["plan", "run"])
def test_nothing_overlaps_and_nothing_scrolls_sideways(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    with Opened(browser, pages[name], width, scheme) as opened:
        across = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert across[0] <= across[1]
        assert opened.page.evaluate(OUTSIDE) == []
        assert opened.page.evaluate(OVERLAPS) == []
        assert opened.complaints == []
        assert opened.asked == [pages[name].as_uri()]


def test_the_checks_would_see_an_overlap_and_a_sideways_scroll(
    browser: Any, pages: dict[str, Path]
) -> None:
    with Opened(browser, pages["plan"], 400, "light") as opened:
        opened.page.add_style_tag(content="dl div { margin-top: -1em } h2 { margin-left: 390px }")
        assert opened.page.evaluate(OVERLAPS) != []
        assert opened.page.evaluate(OUTSIDE) != []


def test_the_button_turns_the_page_dark_and_back(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["plan"], 1280, "light") as opened:
        page = opened.page
        colour = "getComputedStyle(document.body).backgroundColor"
        label = "getComputedStyle(document.querySelector('#f0 text')).fill"
        before = page.evaluate(colour), page.evaluate(label)
        page.click("#theme")
        page.wait_for_selector("body[data-drawn=dark]")
        after = page.evaluate(colour), page.evaluate(label)
        assert before[0] != after[0]
        assert before[1] != after[1]
        page.click("#theme")
        page.wait_for_selector("body[data-drawn=light]")
        assert (page.evaluate(colour), page.evaluate(label)) == before
        assert opened.complaints == []


def test_a_click_on_the_legend_dims_the_other_work(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["plan"], 1280, "light") as opened:
        page = opened.page
        bars = "#f3 .mark-rect.role-mark path"
        opacities = f"[...document.querySelectorAll('{bars}')].map(b => b.getAttribute('opacity'))"
        dimmed = f"{opacities}.filter(opacity => opacity < 1).length"
        assert page.evaluate(dimmed) == 0
        page.locator("#f3 .role-legend-label text", has_text="backward").click()
        page.wait_for_function(dimmed + " > 0")
        shown = page.evaluate(f"document.querySelectorAll('{bars}').length")
        assert 0 < page.evaluate(dimmed) < shown


def test_pointing_at_a_cell_names_the_unit(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["plan"], 1280, "light") as opened:
        opened.page.hover("#f0 .mark-rect.role-mark path >> nth=20")
        opened.page.wait_for_selector("#vg-tooltip-element.visible")
        text = opened.page.inner_text("#vg-tooltip-element")
        assert "transformer." in text
        assert "where" in text


def test_the_timeline_is_dragged_and_comes_back(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["run"], 1280, "light") as opened:
        page = opened.page
        texts = "[...document.querySelectorAll('#f3 .role-axis-label text')]"
        labels = f"{texts}.map(t => t.textContent).sort().join()"
        before = page.evaluate(labels)
        figure = page.locator("#f3 svg")
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        x, y = box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.3
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 200, y, steps=5)
        page.mouse.up()
        page.wait_for_function(f"{labels} !== {before!r}")
        page.mouse.dblclick(x, y)
        page.wait_for_function(f"{labels} === {before!r}")


def test_the_table_folds(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["run"], 400, "dark") as opened:
        assert opened.page.locator("table").is_visible()
        opened.page.click("summary")
        assert not opened.page.locator("table").is_visible()
