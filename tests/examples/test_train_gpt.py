"""The main job end to end, as a user starts it, on a model small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--layers", "4", "--width", "64", "--heads", "2", "--context", "64", "--batch", "4"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python in an empty folder: runs leave an autohete_profile.json where they are."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def train_gpt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, str(ROOT / "examples/train_gpt.py"), *SMALL, *arguments)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = train_gpt(tmp_path_factory.mktemp("demo"), "--steps", "30", "--check", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_budget_is_at_most_a_third_of_the_need_and_the_peak_keeps_within(result) -> None:
    need = result["need"]
    total = sum(need[part] for part in need)
    report = result["report"]
    assert report["device_budget_bytes"] == result["gpu_mem"] <= total / 3
    assert 0 < report["device_peak_measured_bytes"] <= report["device_budget_bytes"]


def test_weights_and_both_moments_equal_plain_pytorch(result) -> None:
    assert result["differences"] == {"weights": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}


def test_something_is_learned_and_bytes_really_move(result) -> None:
    assert result["loss_after"] < result["loss_before"] - 1
    assert result["report"]["h2d_bytes"] > 0
    assert result["report"]["d2h_bytes"] > 0
    assert result["report"]["num_steps"] == 30
    assert result["sample"].startswith("def ")


def test_a_person_sees_plan_progress_and_figures(tmp_path: Path) -> None:
    done = train_gpt(tmp_path, "--steps", "5")
    assert done.returncode == 0, done.stderr
    for word in (
        "strategy autohete",
        "recomputed",
        "measured peak",
        "tokens per second",
        "held-out loss after",
    ):
        assert word in done.stdout, word


def test_a_budget_below_any_plan_ends_in_one_line(tmp_path: Path) -> None:
    command = "from autohete.cli import main; main()"
    done = run(tmp_path, "-c", command, "demo", *SMALL, "--steps", "3", "--gpu-mem", "10KiB")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--gpu-mem" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_hugging_face_models_train_without_change_and_equal_plain_pytorch(
    shape: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    example = str(ROOT / "examples/finetune_hf.py")
    done = run(tmp_path, example, "--shape", shape, "--steps", "8", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest difference from plain PyTorch: 0.0" in done.stdout
