"""A GPT-2 of 124M in fp32, under a third of what plain training keeps, by one line in a Trainer."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import json, torch
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
    callback = AutoHeteCallback(model, gpu_mem=gpu_mem, profile_path=None) if gpu_mem else None
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
    return losses, callback, sum(p.numel() for p in model.parameters())

plain, _, count = run(None)
need = 16 * count  # fp32 weights, gradients and two moments; activations not even counted
ours, callback, _ = run(need // 3)
report = callback.report()
print(json.dumps({
    "parameters": count, "need": need, "plain": plain, "ours": ours,
    "peak": report.device_peak_measured_bytes,
    "predicted": report.device_peak_predicted_bytes,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_gpt2_of_124m_under_a_third_of_its_need_has_the_plain_trainers_loss_curve(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        cwd=tmp_path, capture_output=True, text=True, timeout=1400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    third = seen["need"] // 3
    print(
        f"{seen['parameters']:,} parameters; a third of the need {third / 2**20:.0f} MiB; peak "
        f"{seen['peak'] / 2**20:.0f} MiB, predicted {seen['predicted'] / 2**20:.0f} MiB; losses "
        f"{seen['ours'][0]:.4f} to {seen['ours'][-1]:.4f}"
    )
    assert seen["parameters"] > 124e6 and len(seen["ours"]) == 20
    assert seen["peak"] <= third
    assert seen["ours"] == seen["plain"]
