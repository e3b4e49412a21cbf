"""What tests/random_loops.py builds for a recipe: model, optimizer, scheduler, plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from models import TinyGPT
from oracle import adamw, unit_plan
from recipes import LAYERS, LENGTH, WIDTH, Recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autohete import CPUAdamW, Plan
from autohete.units import find_units


class LoopGPT(TinyGPT):
    """A TinyGPT that checkpoints as its user says, and skips the blocks named."""

    checkpointing = ""
    skipped: tuple[int, ...] = ()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for run in self._runs():
            x = run(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _runs(self) -> Iterator[Callable[[Tensor], Tensor]]:
        blocks = [b for i, b in enumerate(self.blocks) if i not in self.skipped]
        if self.checkpointing == "over two":
            for first in range(0, len(blocks), 2):
                pair = nn.Sequential(*blocks[first : first + 2])
                yield lambda x, pair=pair: checkpoint(pair, x, use_reentrant=False)
            return
        for block in blocks:
            if self.checkpointing and torch.is_grad_enabled():
                yield partial(checkpoint, block, use_reentrant=self.checkpointing == "reentrant")
            else:
                yield block


def build(recipe: Recipe) -> LoopGPT:
    torch.manual_seed(recipe.seed)
    model = LoopGPT(
        layers=LAYERS, width=WIDTH, length=LENGTH, dropout=recipe.dropout, tied=recipe.tied
    )
    model.checkpointing = recipe.checkpointing
    return model.bfloat16() if recipe.precision == "bf16" else model


def make_optimizer(recipe: Recipe, model: LoopGPT) -> CPUAdamW:
    options: dict[str, Any] = {"amsgrad": recipe.amsgrad}
    if recipe.groups == "no decay":
        return adamw(model, **options)
    parameters = dict(model.named_parameters())
    if recipe.groups == "own lr":
        tokens = parameters.pop("tokens.weight")
        groups = [
            {"params": list(parameters.values())},
            {"params": []},
            {"params": [tokens], "lr": 1e-2, "betas": (0.8, 0.99)},
        ]
        return CPUAdamW(groups, lr=3e-3, **options)
    if recipe.groups == "some left out":
        parameters = {n: p for n, p in parameters.items() if "blocks.1" not in n}
    return CPUAdamW(list(parameters.values()), lr=3e-3, **options)


def make_plan(leg: dict[str, Any], model: nn.Module) -> Plan:
    plan = Plan()
    plan.window, plan.chunk_bytes = leg["window"], 4096
    units = []
    for kind, unit in zip(leg["kinds"], find_units(model), strict=False):
        if unit.is_container:
            kind = kind.replace("all", "state")
        if not unit.is_layer:
            kind = kind.partition("+")[0]
        units.append(unit_plan(kind))
    plan.units = units
    return plan


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=40),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}
