"""Long runs: memory that stays flat, loader workers beside updates, and a GPT-2 of 124M."""

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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_gpt2_of_124m_in_a_third_of_its_need_has_the_plain_trainers_loss_curve(tmp_path):
    """fp32, 20 steps of the Hugging Face Trainer; the need is what plain training keeps."""
    pytest.importorskip("transformers")
    words = script(
        """
torch.set_num_threads(os.cpu_count())
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from autohete import CPUAdamW
from autohete.integrations.transformers import AutoHeteCallback

class Data(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 50257, (20, 32), generator=generator)
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

def run(gpu_mem):
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    # The embedding is a quarter of the model: one slot for it, not two; and the plan that needs
    # least, since the planner does not count that a tied weight has two gradients at once.
    plan = forced_plan(model, "all+c", window=1)
    plan.chunk_bytes = 4 << 20
    options = {"gpu_mem": gpu_mem, "plan": plan, "window": 1, "profile_path": None}
    callback = AutoHeteCallback(model, **options) if gpu_mem else None
    args = TrainingArguments(
        "out", max_steps=20, per_device_train_batch_size=1, logging_steps=1, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no",
    )
    optimizer = CPUAdamW(model.parameters(), lr=3e-4)
    trainer = Trainer(
        model, args, train_dataset=Data(), optimizers=(optimizer, None),
        callbacks=[callback] if callback else [],
    )
    set_seed(1)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    report = callback.report() if callback else None
    return losses, report, sum(p.numel() for p in model.parameters())

expected, _, count = run(None)
need = 16 * count  # fp32 weights, gradients, two moments; activations not even counted
losses, report, _ = run(need // 3 - 1)
print(count, need, report.device_peak_measured_bytes, len(losses))
print("equal" if losses == expected else f"{losses} {expected}")
""",
        tmp_path,
        timeout=1400,
    )
    print("parameters, need, peak, steps:", *words[:4])
    assert int(words[2]) <= int(words[1]) // 3
    assert words[3:] == ["20", "equal"]
