"""Long runs: memory that stays flat, and loader workers beside updates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PRELUDE = """
import gc, os, sys
import torch
from models import batch, make_gpt
from oracle import adamw, forced_plan, plain_loop
from autohete import AutoHeteWrapper
torch.set_num_threads(1)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def wrap(model, optimizer, kind="all+c"):
    plan = forced_plan(model, kind) if kind else None
    return AutoHeteWrapper(
        model, optimizer, gpu_mem="64MiB", cpu_mem="512MiB", plan=plan, profile_path=None
    ).to("cpu")
"""


def script(body: str, folder: Path, timeout: float = 280) -> list[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body], capture_output=True, text=True, timeout=timeout,
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ['"all+c"', "None"], ids=["forced", "planned"])
def test_host_memory_is_flat_from_step_20_to_step_1000(kind, tmp_path):
    words = script(
        f"""
model = make_gpt(layers=4, width=64)
optimizer = adamw(model)
trained = wrap(model, optimizer, {kind})
for step in range(1000):
    plain_loop(trained, optimizer, step)
    if step in (19, 999):
        print(resident())
""",
        tmp_path,
    )
    print("resident at step 20 and 1000:", *words)
    assert int(words[1]) == pytest.approx(int(words[0]), rel=0.01)


@pytest.mark.slow
def test_host_memory_is_flat_over_20_rounds_of_wrapping(tmp_path):
    words = script(
        """
for number in range(20):
    model = make_gpt(layers=4, width=128)
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, number)
    trained.unwrap()
    del trained, model, optimizer
    if number in (2, 19):
        print(resident())
""",
        tmp_path,
    )
    print("resident after round 3 and 20:", *words)
    assert int(words[1]) == pytest.approx(int(words[0]), rel=0.01)


@pytest.mark.slow
def test_4_loader_workers_made_anew_for_50_epochs_run_beside_updates_in_flight(tmp_path):
    """fork, and pinned batches where torch can pin; no hang, and the bits of plain training."""
    words = script(
        """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        tokens, targets = batch(index, rows=1)
        return tokens[0], targets[0]

def run(wrapped):
    model = make_gpt(layers=2, dropout=0.0)
    optimizer = adamw(model)
    trained = wrap(model, optimizer) if wrapped else model
    losses = []
    for epoch in range(50 if wrapped else 50):
        workers = 4 if wrapped else 0
        context = "fork" if wrapped else None
        loader = DataLoader(
            Data(), batch_size=2, num_workers=workers, multiprocessing_context=context,
            pin_memory=wrapped and torch.cuda.is_available(),
        )
        for tokens, targets in loader:
            loss = trained(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses

print("equal" if run(True) == run(False) else "different")
""",
        tmp_path,
    )
    assert words == ["equal"]
