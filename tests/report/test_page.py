"""The page is whole by itself: no address outside it, nothing of the user's can break it."""

from __future__ import annotations

import json
import re

import pytest

from autohete.planning.plan_report import PlanReport
from autohete.report.content import Content, content_of_plan_report, content_of_run
from autohete.report.page import page
from autohete.run_report import RunReport


@pytest.fixture(scope="module")
def text(planned: PlanReport) -> str:
    return page(content_of_plan_report(planned))


def test_the_page_asks_for_nothing_outside_itself(text: str) -> None:
    assert not re.search(r"<script[^>]*\ssrc\s*=", text)
    without_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)\s*=|@import|url\(", without_scripts)


def test_every_placeholder_is_filled(text: str) -> None:
    assert not re.search(r"@(TITLE|FACTS|FIGURES|PLAN|VERSION|DATA|LIBRARY)@", text)


def test_its_data_is_strict_json_with_every_figure(text: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data = json.loads(found[1])
    assert len(data["figures"]) == text.count('class="figure"')
    assert set(data["themes"]) == {"light", "dark"}


def test_without_scripts_the_facts_and_the_plan_are_there(text: str) -> None:
    readable = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "tokens per second: predicted" in readable
    assert "<td>recomputed</td>" in readable


def test_a_name_from_the_user_cannot_break_the_page(traced: RunReport) -> None:
    assert traced.details is not None
    content = content_of_run(traced, title="</title><script>alert(1)</script>")
    content.unit_names = ["</script><b>"] * len(traced.details.unit_names)
    text = page(content)
    assert "<script>alert" not in text
    assert "</script><b>" not in text


def test_a_page_about_nothing_is_still_a_page() -> None:
    assert "<h1>empty</h1>" in page(Content("empty"))
