"""Fine-tune Hugging Face models that know nothing of autohete, with the loop you already have.

    python examples/finetune_hf.py                     GPT-2 and Llama shapes, random weights
    python examples/finetune_hf.py --shape llama --check
    python examples/finetune_hf.py --device cuda

It needs transformers (`pip install transformers`). The configurations are small and the weights
random, so nothing is downloaded; for a real model put `AutoModelForCausalLM.from_pretrained(...)`
where `build` is called. --check trains the same model under plain PyTorch with autohete.CPUAdamW
and prints the largest difference of the weights.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.cli.progress import steps_shown
from autohete.demo.text import batches, standard_library_text

CONTEXT = 64
VOCABULARY = 256  # bytes


def build(shape: str) -> PreTrainedModel:
    """Return a small causal language model with random weights."""
    torch.manual_seed(0)
    if shape == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=128, n_layer=6, n_head=4)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )


def train(
    model: Any, optimizer: Optimizer, text: Tensor, steps: int, device: str, title: str
) -> list[float]:
    """The loop of every tutorial; returns the losses."""
    torch.manual_seed(1)  # dropout
    data = batches(text, batch=4, context=CONTEXT, seed=0)
    losses = []
    model.train()
    for _ in steps_shown(title, steps):
        tokens = next(data)[0].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fine_tune(shape: str, options: argparse.Namespace) -> bool:
    """Train one shape; False when --check found a difference."""
    text = standard_library_text().training
    plain = build(shape)
    model: Any = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = AutoHeteWrapper(model, optimizer, gpu_mem=options.gpu_mem)
    model = model.cuda() if options.device == "cuda" else model.to("cpu")
    losses = train(model, optimizer, text, options.steps, options.device, shape)
    prompt = torch.tensor([list(b"def ")], device=options.device)
    with torch.no_grad():
        written = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    print(f"{shape}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")
    print(f"  writes {bytes(written[0].tolist())!r}")
    print(f"  {model.report()}")
    if not options.check:
        return True
    reference = CPUAdamW(plain.parameters(), lr=1e-3)
    train(plain, reference, text, options.steps, "cpu", f"{shape}, plain PyTorch")
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    largest = max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
    print(f"  largest difference from plain PyTorch: {largest!r}")
    return largest == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune Hugging Face causal language models")
    parser.add_argument("--shape", choices=["gpt2", "llama", "both"], default="both")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu-mem", default="16MiB", help="device memory (default: 16MiB)")
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch (cpu)")
    options = parser.parse_args()
    if options.check and options.device == "cuda":
        parser.error("--check compares with plain PyTorch on the CPU; leave --device out")
    shapes = ["gpt2", "llama"] if options.shape == "both" else [options.shape]
    equal = [fine_tune(shape, options) for shape in shapes]
    if not all(equal):
        sys.exit(1)


if __name__ == "__main__":
    main()
