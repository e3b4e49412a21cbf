"""Scripts that know nothing of ranks, started by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "4", "--width", "64", "--heads", "2", "--context", "64", "--batch", "4"]


def torchrun(folder: Path, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in known}
    paths = (ROOT, ROOT / "tests", ROOT / "tests/integrations")
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(size), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_with_no_other_change(tmp_path):
    script = str(ROOT / "examples/train_gpt.py")
    done = torchrun(tmp_path, 2, script, *SMALL, "--steps", "30", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # of the first rank alone
    assert result["loss_after"] < result["loss_before"] - 1
    assert result["report"]["device_peak_measured_bytes"] <= result["gpu_mem"]
    assert (tmp_path / "autohete_profile.json").exists()


@pytest.mark.slow
def test_the_trainer_on_two_ranks_gives_the_bits_of_ddp_and_is_not_wrapped_in_it(tmp_path):
    pytest.importorskip("transformers")
    done = torchrun(tmp_path, 2, str(Path(__file__).with_name("trainer_script.py")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2
