"""A Lightning Trainer in a part of the device memory its model needs.

    python examples/lightning_module.py                  on the host device
    python examples/lightning_module.py --check          compare with the plain Trainer, to the bit
    python examples/lightning_module.py --device cuda --gpu-mem 24GiB --precision bf16-mixed

One argument differs from the plain Trainer: strategy=AutoHeteStrategy(...).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from autohete import CPUAdamW
from autohete.demo.gpt import GPT, GPTConfig
from autohete.demo.text import standard_library_text
from autohete.integrations.lightning import AutoHeteStrategy

CONTEXT, BATCH = 64, 4


class Language(LightningModule):
    """A small GPT over bytes; put your own module here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(GPTConfig(context=CONTEXT, num_layers=6, width=128))
        self.on_cpu = device == "cpu"

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        loss: Tensor = self.net(tokens[:, :-1], tokens[:, 1:])
        return loss

    def configure_optimizers(self) -> Any:
        if self.on_cpu:
            return CPUAdamW(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Losses(Callback):
    """Keeps what the Trainer would log."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, *_: Any) -> None:
        self.values.append(out["loss"].item())


def train(options: argparse.Namespace, *, wrap: bool) -> tuple[Language, Losses, Trainer]:
    seed_everything(0, verbose=False)
    model, losses = Language(options.device), Losses()
    rows = standard_library_text().training[: options.steps * BATCH * (CONTEXT + 1)].long()
    data: Any = DataLoader(TensorDataset(rows.view(-1, CONTEXT + 1)), batch_size=BATCH)
    strategy: Any = AutoHeteStrategy(options.gpu_mem, profile_path=None) if wrap else "auto"
    trainer = Trainer(
        strategy=strategy,
        accelerator=options.device,
        devices=1,
        precision=options.precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return model, losses, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="A Lightning Trainer under autohete")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu-mem", default="16MiB", help="device memory (default: 16MiB)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--check", action="store_true", help="compare with the plain Trainer (cpu)")
    options = parser.parse_args()
    if options.check and options.device == "cuda":
        parser.error("--check compares to the bit on the CPU; leave --device out")
    model, losses, trainer = train(options, wrap=True)
    print(f"loss {losses.values[0]:.3f} -> {losses.values[-1]:.3f} in {len(losses.values)} batches")
    assert isinstance(trainer.strategy, AutoHeteStrategy)
    print(trainer.strategy.report())
    if options.check:
        plain, expected, _ = train(options, wrap=False)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        equal = losses.values == expected.values and all(torch.equal(a, b) for a, b in pairs)
        print(f"equal to the plain Trainer: {equal}")
        sys.exit(not equal)


if __name__ == "__main__":
    main()
