"""The Hugging Face Trainer in a part of the device memory it needs: one line more.

    python examples/trainer.py                       on the host device
    python examples/trainer.py --check               compare with the plain Trainer, to the bit
    python examples/trainer.py --device cuda --gpu-mem 24GiB

The model is small and its weights random, so nothing is downloaded; for a real one put
`AutoModelForCausalLM.from_pretrained(...)` where `build` is called.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from autohete import CPUAdamW
from autohete.demo.text import standard_library_text
from autohete.integrations.transformers import AutoHeteCallback

CONTEXT = 64


class Rows(Dataset[dict[str, Tensor]]):
    """Python source as rows of bytes."""

    def __init__(self, text: Tensor, rows: int) -> None:
        self.rows = text[: rows * CONTEXT].long().view(rows, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build() -> GPT2LMHeadModel:
    """Return a small causal language model over bytes."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=6,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def train(options: argparse.Namespace, folder: str, *, plain: bool) -> Trainer:
    """Return the Trainer after training; `plain` leaves our line out."""
    model = build()
    text = standard_library_text()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=max(1, options.steps // 4),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_strategy="steps",
        save_steps=max(1, options.steps // 2),
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=options.device == "cpu",
    )
    # --check compares to the bit, so both sides use the optimizer that runs on the CPU here.
    optimizer = CPUAdamW(model.parameters(), lr=1e-3) if options.check else None
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rows(text.training, 512),
        eval_dataset=Rows(text.held_out, 32),
        optimizers=(optimizer, None),  # type: ignore[arg-type]
        callbacks=[] if plain else [AutoHeteCallback(model, gpu_mem=options.gpu_mem)],
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face Trainer under autohete")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu-mem", default="24MiB", help="device memory (default: 24MiB)")
    parser.add_argument("--check", action="store_true", help="compare with the plain one (cpu)")
    options = parser.parse_args()
    if options.check and options.device == "cuda":
        parser.error("--check compares to the bit on the CPU; leave --device out")
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(options, folder, plain=False)
        callback = trainer.pop_callback(AutoHeteCallback)
        print(callback.report())
        if not options.check:
            return
        plain = train(options, folder, plain=True)
    pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    losses = [[e.get("loss") for e in t.state.log_history] for t in (trainer, plain)]
    equal = losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)
    print(f"equal to the plain Trainer: {equal}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
