"""What a command shows while its steps run: where it is, and how long the rest may take."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autohete.cli import progress
from autohete.cli.progress import Steps, about, steps_shown


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_in_a_pipe_every_tenth_is_a_line_with_the_time_that_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    for step in steps_shown("gpt2", 20):
        clock.now += {0: 60.0, 3: 9.0}.get(step, 2.0)  # two are not like the others
    out, err = capsys.readouterr()
    assert out == "", "results go there"
    lines = err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "gpt2: step 2 of 20, about 36 s to go"
    assert lines[1] == "gpt2: step 4 of 20, about 32 s to go"
    assert lines[-1] == "gpt2: step 20 of 20"


def test_a_part_has_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Steps("preparing", 4) as shown:
        for which in ("autohete", "autohete", "plain PyTorch", "plain PyTorch"):
            clock.now += 1.0
            shown.done(which)
    assert capsys.readouterr().err.splitlines() == [
        "autohete: step 1 of 4",
        "autohete: step 2 of 4, about 2 s to go",
        "plain PyTorch: step 3 of 4, about 1 s to go",
        "plain PyTorch: step 4 of 4",
    ]


def test_on_a_terminal_there_is_a_bar_with_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for _ in steps_shown("gpt2", 3):
        pass
    text = shown.getvalue()
    assert "gpt2" in text
    assert "3/3" in text
    assert ":00" in text
    assert "step 3 of 3" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "less than 1 s"), (7.4, "about 7 s"), (99.0, "about 99 s"), (150.0, "about 2 min")],
)
def test_durations_are_said_in_round_figures(seconds: float, text: str) -> None:
    assert about(seconds) == text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_loop_gives_the_terminal_back(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    def interrupted() -> None:
        with Steps("gpt2", 3) as steps:
            steps.done()
            raise error

    with pytest.raises(error):
        interrupted()
    assert shown.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is there again"


def test_compare_and_trace_say_how_long_they_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from click.testing import CliRunner

    from autohete.cli.main import group

    def said(*arguments: str) -> Any:
        result = CliRunner().invoke(group, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stderr

    small = ("--layers", "1", "--width", "32", "--steps", "5")
    shown = said("compare", *small)
    assert "autohete: step 5 of 10, " in shown
    assert "plain PyTorch: step 10 of 10" in shown
    assert " to go" in shown
    shown = said("trace", "--steps", "5", "-o", str(tmp_path / "trace.json"))
    assert "training: step 5 of 5" in shown
    assert " to go" in shown
