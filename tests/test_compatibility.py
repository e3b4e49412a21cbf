"""docs/compatibility.md stands on tests that exist, and says what its rows say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from buildtools import compatibility

ROOT = Path(__file__).resolve().parent.parent
TABLE = compatibility.read_rows(compatibility.ROWS.read_text())


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what[:40])
def test_every_row_stands_on_tests_that_exist(row):
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name in functions(ROOT / path), test


def test_the_page_is_that_of_the_rows():
    """The counts are those of the last run; everything else is compared."""
    counts = dict.fromkeys((test for row in TABLE for test in row.tests), 0)
    expected = compatibility.render(TABLE, counts)

    def without_counts(page: str) -> str:
        return re.sub(r" \| \d+ \| `", " | `", page)

    page = compatibility.PAGE.read_text()
    assert without_counts(page) == without_counts(expected), (
        "run the tests with --junitxml, then buildtools/compatibility.py"
    )
    assert " | 0 | " not in page


def test_a_test_that_failed_or_was_not_run_is_no_row(tmp_path, monkeypatch):
    first, second = TABLE[0].tests[0], TABLE[1].tests[0]
    monkeypatch.setattr(compatibility, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page")
    (tmp_path / "rows").write_text(f"## A\none | equal | {first}\ntwo | equal | {second}\n")

    def case(test: str, outcome: str) -> str:
        path, _, name = test.partition("::")
        module = path.removesuffix(".py").replace("/", ".")
        return f'<testcase classname="{module}" name="{name}[1]">{outcome}</testcase>'

    def run(*cases: str) -> None:
        (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
        compatibility.main([str(tmp_path / "report.xml")])

    with pytest.raises(SystemExit, match=f"not run: {second}"):
        run(case(first, ""), case(second, "<skipped/>"))
    with pytest.raises(SystemExit, match=f"failed: {second}"):
        run(case(first, ""), case(second, ""), case(second, "<failure/>"))
    assert not (tmp_path / "page").exists()
    run(case(first, ""), case(first, ""), case(second, ""))
    page = (tmp_path / "page").read_text()
    assert "| one | equal | 2 |" in page and "| two | equal | 1 |" in page
