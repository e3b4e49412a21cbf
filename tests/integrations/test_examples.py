"""The integrations' examples, as a user starts them; each compares itself with the plain run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "trainer.py --steps 6 --check",
        "accelerate_loop.py --batches 12 --check",
        "lightning_module.py --steps 12 --check",
    ],
)
def test_the_example_equals_the_plain_run(tmp_path, command):
    name, *arguments = command.split()
    if "lightning" in name:
        pytest.importorskip("lightning", reason="lightning is not installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("True")
    assert "device memory" in done.stdout
