"""Progress says how far it is, in words; it is silent where nobody looks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autohete.report import live
from autohete.report.live import Live

METRICS = {"autohete/device_peak_measured_bytes": 2**20, "autohete/step_seconds_last": 0.25}


def test_steps_and_figures_are_shown_in_words() -> None:
    shown = Live(total=4, title="tuning")
    with shown:
        shown.step(loss=2.5, **METRICS)
    facts = dict(shown.facts())
    assert facts["steps"] == "1/4"
    assert facts["loss"] == "2.5"
    assert facts["device memory"] == "1.00 MiB"
    assert facts["last step"] == "0.25 s"
    assert shown.text().startswith("tuning: steps 1/4")


def test_what_is_not_known_in_words_is_left_out() -> None:
    shown = Live(total=1)
    shown.step(**{"autohete/slot_misses": 3.0})
    assert "slot" not in shown.text()


def test_in_a_pipe_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    with Live(total=2) as shown:
        shown.step(loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_in_a_notebook_one_display_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    handle = SimpleNamespace(update=lambda shown: seen.append(shown.data))

    def display(shown: Any, display_id: bool) -> Any:
        seen.append(shown.data)
        return handle

    fake = SimpleNamespace(display=display, HTML=lambda text: SimpleNamespace(data=text))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    with Live(total=3, title="<b>") as shown:
        for _ in range(3):
            shown.step(loss=1.0)
    assert 'value="0" max="3"' in seen[0]
    assert 'value="3" max="3"' in seen[-1]
    assert "<b>" not in "".join(seen), "a title is text"
