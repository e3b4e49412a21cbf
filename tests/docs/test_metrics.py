"""Logs and metrics are as their page says."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import make_gpt
from oracle import adamw, plain_loop

from autohete import AutoHeteWrapper

ROOT = Path(__file__).resolve().parent.parent.parent


def trained(steps: int = 4, **options: object) -> AutoHeteWrapper:
    model = make_gpt()
    optimizer = adamw(model)
    options = {"gpu_mem": "700KiB", "profile_path": None, **options}
    wrapped = AutoHeteWrapper(model, optimizer, **options).to("cpu")  # type: ignore[arg-type]
    for step in range(steps):
        plain_loop(wrapped, optimizer, step)
    return wrapped


def test_each_decision_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autohete"):
        trained().unwrap()
    lines = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in lines)
    assert sum("wrapped in" in line for line in lines) == 1
    assert sum("planned:" in line for line in lines) == 1


def test_nothing_is_printed_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    trained().unwrap()
    assert capfd.readouterr() == ("", "")


def test_every_metric_of_the_page_is_there_and_is_a_number() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`(autohete/\w+)`", text))
    named |= {f"autohete/{name}" for name in re.findall(r"`\.\.\./(\w+)`", text)}
    wrapped = trained()
    metrics = wrapped.metrics()
    wrapped.unwrap()
    assert named - metrics.keys() == set()
    assert metrics.keys() - named == set()
    assert all(type(value) is float for value in metrics.values())


def test_metrics_grow_with_the_steps() -> None:
    model = make_gpt()
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(model, optimizer, gpu_mem="700KiB", profile_path=None).to("cpu")
    seen = []
    for step in range(4):
        plain_loop(wrapped, optimizer, step)
        seen.append(wrapped.metrics())
    wrapped.unwrap()
    assert [m["autohete/num_steps"] for m in seen] == [1.0, 2.0, 3.0, 4.0]
    moved = [m["autohete/h2d_bytes"] for m in seen]
    assert moved == sorted(moved) and moved[-1] > moved[0]


@pytest.mark.slow
def test_the_tensorboard_example_writes_what_its_own_reader_reads(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script = ROOT / "examples/tensorboard_metrics.py"
    done = subprocess.run(
        [sys.executable, str(script), "--logdir", str(tmp_path), "--steps", "3"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "loss" in tags
    assert "autohete/h2d_bytes" in tags
    assert [scalar.step for scalar in events.Scalars("loss")] == [0, 1, 2]
