"""The documentation is true: links lead somewhere, code runs, commands and options exist."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from autohete.cli.main import SUBCOMMANDS, group

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.as_posix(),
)

# Blocks that are compiled only: what they need is not here, or is a placeholder of the reader's.
NOT_RUN = {
    "README.md": "the model and the loader are the reader's",
    "docs/integrations.md": "the model and the data are the reader's",
    "docs/planning.md": "the profile is the reader's",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue  # others' servers are not ours to test
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        if found.name == "compatibility.md" and not found.exists():
            continue  # made from a whole run's report; the site's own test needs it
        assert found.exists(), f"{relative(page)}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{relative(page)}: {target}"


def test_every_page_of_the_site_is_in_its_table_of_contents() -> None:
    def listed(index: Path) -> set[Path]:
        found: set[Path] = set()
        for block in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.S):
            for line in block.splitlines():
                if line and not line.startswith(":"):
                    found.update(index.parent.glob(f"{line}.md"))
        return found

    pages = set((ROOT / "docs").rglob("*.md"))
    reached = {ROOT / "docs/index.md"}
    while new := {p for page in reached for p in listed(page)} - reached:
        reached |= new
    assert {relative(p) for p in pages - reached} - {"docs/compatibility.md"} == set()


def test_every_decision_is_listed() -> None:
    text = (ROOT / "docs/adr/index.md").read_text(encoding="utf-8")
    decisions = {path.name for path in (ROOT / "docs/adr").glob("0*.md")}
    assert decisions - set(re.findall(r"\((0[^)]+\.md)\)", text)) == set()


# ---------------------------------------------------------------- code


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_compile(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, relative(page), "exec")


RUNNABLE = [p for p in PAGES if blocks(p, "python") and relative(p) not in NOT_RUN]


@pytest.mark.parametrize("page", RUNNABLE, ids=relative)
def test_python_blocks_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks(page, "python"):
        exec(compile(code, relative(page), "exec"), names)


def test_what_is_not_run_has_a_reason_and_code() -> None:
    for name in NOT_RUN:
        assert blocks(ROOT / name, "python"), f"{name} has no code any more"


def modules_with_examples() -> list[str]:
    files = sorted((ROOT / "autohete").rglob("*.py"))
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if ">>> " in file.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_say_what_happens(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------- commands


def commands_in(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    in_blocks = [line.split("#")[0].strip() for b in blocks(page, "sh") for line in b.splitlines()]
    in_text = re.findall(r"`(autohete [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [c for c in [*in_blocks, *in_text] if c.startswith("autohete ")]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_and_their_options_exist(page: Path) -> None:
    for command in commands_in(page):
        name = command.split()[1]
        if not name.islower() or name.startswith("-"):
            continue  # COMMAND, --help
        assert name in SUBCOMMANDS, f"{relative(page)}: {command}"
        found = group.get_command(click.Context(group), name)
        assert found is not None
        known = {option for parameter in found.params for option in parameter.opts} | {"--help"}
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", command):
            assert option in known, f"{relative(page)}: {command}"


def test_who_is_told_of_make_demo_is_told_how_to_enter_its_environment() -> None:
    pages = [page for page in PAGES if "make demo " in page.read_text(encoding="utf-8")]
    assert pages
    for page in pages:
        after = "\n".join(blocks(page, "sh")).partition("make demo ")[2]
        assert ". .venv/bin/activate" in after.partition("autohete ")[0], relative(page)
    told = subprocess.run(  # a make inside a make says where it is
        ["make", "--dry-run", "--no-print-directory", "demo"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ". .venv/bin/activate" in told.stdout.splitlines()[-1]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    places = "benchmarks|examples|buildtools|tests|csrc|docs|autohete"
    for path in re.findall(rf"`((?:{places})/[\w/.-]+\.(?:py|h|cpp|sh|md|ipynb|txt))`", text):
        if path != "docs/compatibility.md":
            assert (ROOT / path).exists(), f"{relative(page)}: {path}"


# ---------------------------------------------------------------- the site


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/api.html").read_text()
    for name in ("AutoHeteWrapper", "make_plan", "RunReport"):
        assert f"{name}" in page


@pytest.mark.slow
def test_the_generated_page_is_what_the_planner_says_today() -> None:
    done = subprocess.run(
        [sys.executable, "buildtools/make_docs.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- files


def files_of_the_reader() -> set[str]:
    """What the code and the commands of README and quick start write where they are called."""
    names = {"autohete_profile.json"}
    for page in (ROOT / "README.md", ROOT / "docs/quickstart.md"):
        for code in blocks(page, "python"):
            names |= set(re.findall(r'(?:save|trace|save_checkpoint)\("([^"]+)"', code))
        for code in blocks(page, "sh"):
            names |= set(re.findall(r"--run (\S+)", code))
            names |= {Path(source).stem + ".html" for source in re.findall(r"report (\S+)", code)}
            if "autohete trace" in code:
                names.add("trace.json")
    return names


def test_what_the_first_commands_write_leaves_a_clone_clean() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    names = files_of_the_reader()
    assert names >= {"7b.html", "autohete_run.json", "autohete_run.html", "trace.json", "run.pt"}
    done = subprocess.run(
        ["git", "check-ignore", *sorted(names)], cwd=ROOT, capture_output=True, text=True
    )
    assert names - set(done.stdout.split()) == set(), done.stderr


def test_the_quick_starts_plan_moves_something_off_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(ROOT / "docs/quickstart.md", "python")[0]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "docs/quickstart.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "strategy autohete" in shown
    assert re.search(r"^\S.*  (device|host) +host$", shown, re.M), shown
    names["model"].unwrap()
