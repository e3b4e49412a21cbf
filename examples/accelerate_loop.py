"""A loop with Hugging Face Accelerate, in a part of the device memory it needs.

    python examples/accelerate_loop.py                       on the host device
    python examples/accelerate_loop.py --check               compare with the plain loop, to the bit
    python examples/accelerate_loop.py --device cuda --gpu-mem 24GiB --mixed-precision fp16

Two lines differ from the plain loop: the model is wrapped, and placed before `prepare`, so that the
step() Accelerate takes from the optimizer is the one autohete put there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.demo.text import standard_library_text

CONTEXT, BATCH = 64, 4


def build() -> LlamaForCausalLM:
    """Return a small model over bytes; put `from_pretrained(...)` here."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )


def train(options: argparse.Namespace, *, wrap: bool) -> tuple[Any, list[float]]:
    """Train, save the state half-way, go back to it, train the rest again; return the losses."""
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=options.mixed_precision,
        cpu=options.device == "cpu",
    )
    rows = standard_library_text().training[: options.batches * BATCH * CONTEXT].long()
    data: Any = DataLoader(rows.view(-1, CONTEXT), batch_size=BATCH)  # type: ignore[arg-type]
    model: Any = build()
    optimizer: Any = (
        CPUAdamW(model.parameters(), lr=1e-3)
        if options.device == "cpu"
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    if wrap:
        model = AutoHeteWrapper(model, optimizer, gpu_mem=options.gpu_mem, profile_path=None)
        model.to(accelerator.device)  # before prepare()
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.batches)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    def train_on(tokens: Tensor) -> float:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    half = options.batches // 4 * 2  # whole accumulation windows
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for index, tokens in enumerate(data):
            if index == half:
                accelerator.save_state(folder)
            losses.append(train_on(tokens))
        accelerator.load_state(folder)
    for tokens in accelerator.skip_first_batches(data, half):
        losses.append(train_on(tokens))
    if losses[half : options.batches] != losses[options.batches :] and options.device == "cpu":
        raise RuntimeError("training from the saved state went another way than before")
    return model, losses[: options.batches]


def main() -> None:
    parser = argparse.ArgumentParser(description="An Accelerate loop under autohete")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu-mem", default="16MiB", help="device memory (default: 16MiB)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default="no")
    parser.add_argument("--check", action="store_true", help="compare with the plain loop (cpu)")
    options = parser.parse_args()
    if options.check and options.device == "cuda":
        parser.error("--check compares to the bit on the CPU; leave --device out")
    model, losses = train(options, wrap=True)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} batches")
    print(model.report())
    if options.check:
        plain, expected = train(options, wrap=False)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        equal = losses == expected and all(torch.equal(a, b) for a, b in pairs)
        print(f"equal to the plain loop: {equal}")
        sys.exit(not equal)


if __name__ == "__main__":
    main()
