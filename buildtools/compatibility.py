"""Write docs/compatibility.md from what the tests showed.

    pytest -n auto -m "not gpu" --junitxml=report.xml
    python buildtools/compatibility.py report.xml

docs/compatibility.rows says which tests stand for which promise. A row is written only if every
case of its tests passed in the reports; otherwise this ends with an error that names them.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROWS, PAGE = DOCS / "compatibility.rows", DOCS / "compatibility.md"

HEAD = """# What works, and what is refused

Written by `buildtools/compatibility.py` from the reports of the tests; every row passed. "Equal" is
to the bit, with plain PyTorch and `autohete.CPUAdamW` on the host device: losses, weights, both
moments and step counters. "Refused" is an error that says what to do instead. The number is how
many cases were run.
"""


@dataclass(frozen=True)
class Row:
    section: str
    what: str
    behaviour: str
    tests: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    """Return the rows of docs/compatibility.rows."""
    rows, section = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line and not line.startswith("#"):
            what, behaviour, tests = (part.strip() for part in line.split(" | "))
            rows.append(Row(section, what, behaviour, tuple(tests.split())))
    return rows


def read_reports(paths: Iterable[Path]) -> dict[str, list[bool]]:
    """Return by test function (path::name) whether each of its cases passed; skipped: not run.

    Of a test that was run again, a later report counts.
    """
    all_results: dict[str, list[bool]] = {}
    for path in paths:
        results: dict[str, list[bool]] = defaultdict(list)
        for case in ElementTree.parse(path).iter("testcase"):
            outcomes = {child.tag for child in case}
            if "skipped" not in outcomes:
                file = case.get("classname", "").replace(".", "/") + ".py"
                name = case.get("name", "").partition("[")[0]
                results[f"{file}::{name}"].append(not outcomes & {"failure", "error"})
        all_results.update(results)
    return all_results


def render(rows: list[Row], counts: Mapping[str, int]) -> str:
    """Return the page; `counts` are the cases of each test."""
    lines, section = [HEAD], ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"## {section}\n\n| what | what happens | cases | shown by |")
            lines.append("| --- | --- | --- | --- |")
        shown = " ".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        count = sum(counts[test] for test in row.tests)
        lines.append(f"| {row.what} | {row.behaviour} | {count} | {shown} |")
        if row is rows[-1] or rows[rows.index(row) + 1].section != section:
            lines.append("")
    return "\n".join(lines)


def main(reports: list[str]) -> None:
    rows = read_rows(ROWS.read_text())
    results = read_reports(map(Path, reports))
    wanted = {test for row in rows for test in row.tests}
    missing = sorted(test for test in wanted if not results.get(test))
    failed = sorted(test for test in wanted if not all(results.get(test, [])))
    if missing or failed:
        sys.exit(
            "\n".join([*(f"not run: {t}" for t in missing), *(f"failed: {t}" for t in failed)])
        )
    PAGE.write_text(render(rows, {test: len(results[test]) for test in wanted}))


if __name__ == "__main__":
    main(sys.argv[1:])
