"""Loops that ranks run, and the same split in one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from models import batch, make_gpt
from oracle import adamw, forced_plan
from torch import Tensor, nn

from autohete import AutoHeteWrapper
from autohete.planning.profile_file import plan_to_dict

ROWS = 2  # of one micro-batch


@dataclass(frozen=True)
class Setup:
    kind: str | None = "all+c"
    steps: int = 6
    micro_batches: int = 1
    no_sync: bool = True
    clip: float | None = None
    tied: bool = False
    ragged: bool = False
    """Sequence lengths differ by rank."""
    grows: bool = False
    """From the third step on, the last rank's sequences are twice as long."""
    layers: int = 4
    width: int = 32
    bf16: bool = False
    wrap: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        model = make_gpt(layers=self.layers, width=self.width, dropout=0.0, tied=self.tied)
        return model.bfloat16() if self.bf16 else model


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    hashes: list[str]
    weights: list[Tensor]
    moments: list[dict[str, Tensor]]
    extra: dict[str, Any] = field(default_factory=dict)


def part(setup: Setup, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """The rows of one rank in one micro-batch."""
    length = 16 - 5 * (rank % 3) if setup.ragged else 16
    if setup.grows:
        length = 16 if step > 2 and rank == 1 else 8
    number = (step * 10 + micro) * 10 + rank
    tokens, targets = batch(number, rows=ROWS)
    return tokens[:, :length], targets[:, :length]


def hash_of(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def full(value: Tensor) -> Tensor:
    """A state tensor whole, wherever its parts are."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def taken(model: nn.Module, optimizer: Any, **series: Any) -> Trained:
    moments = []
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        moments.append({key: full(value) for key, value in state.items()})
    weights = [p.detach().clone() for p in model.parameters()]
    return Trained(weights=weights, moments=moments, **series)


def train_rank(rank: int, size: int, setup: Setup) -> Trained:
    """What a user's loop does on one rank."""
    model = setup.model()
    if rank:  # the first rank's weights count
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    optimizer = adamw(model)
    keywords: dict[str, Any] = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}
    if setup.kind is not None:
        keywords["plan"] = forced_plan(model, setup.kind)
    trained = AutoHeteWrapper(model, optimizer, **{**keywords, **setup.wrap}).to("cpu")
    losses, norms, hashes = [], [], []
    for step in range(setup.steps):
        for micro in range(setup.micro_batches):
            tokens, targets = part(setup, step, micro, rank)
            last = micro == setup.micro_batches - 1
            if setup.no_sync and not last:
                with trained.no_sync():
                    loss = trained(tokens, targets)
                    (loss / setup.micro_batches).backward()
            else:
                loss = trained(tokens, targets)
                (loss / setup.micro_batches).backward()
            losses.append(loss.item())
        if setup.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(trained.parameters(), setup.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        states = [v for p in model.parameters() for v in optimizer.state[p].values()]
        hashes.append(hash_of([*model.parameters(), *map(full, states)]))
    result = taken(model, optimizer, losses=losses, norms=norms, hashes=hashes)
    result.extra["counters"] = trained.run.engine.counters()
    result.extra["replans"] = trained.run.plans.num_replans
    if trained.plan is not None:
        result.extra["plan"] = plan_to_dict(trained.plan)
    trained.unwrap()
    return result


def train_alone(size: int, setup: Setup) -> Trained:
    """Plain PyTorch: one process accumulates what the ranks would have, in their order."""
    model = setup.model()
    optimizer = adamw(model)
    losses, norms, hashes = [], [], []
    for step in range(setup.steps):
        for rank in range(size):
            for micro in range(setup.micro_batches):
                loss = model(*part(setup, step, micro, rank))
                (loss / setup.micro_batches).backward()
                losses.append(loss.item())
        for p in model.parameters():  # the mean over ranks, as they take it: of gradients
            if p.grad is not None:
                p.grad.div_(size)
        _finish(setup, model, optimizer, norms)
        hashes.append("")
    return taken(model, optimizer, losses=losses, norms=norms, hashes=hashes)


def train_joined(size: int, setup: Setup) -> Trained:
    """Plain PyTorch: one process, all ranks' rows as one batch (of equal lengths)."""
    model = setup.model()
    optimizer = adamw(model)
    losses, norms, hashes = [], [], []
    for step in range(setup.steps):
        for micro in range(setup.micro_batches):
            parts = [part(setup, step, micro, rank) for rank in range(size)]
            loss = model(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            (loss / setup.micro_batches).backward()
            losses.append(loss.item())
        _finish(setup, model, optimizer, norms)
        hashes.append("")
    return taken(model, optimizer, losses=losses, norms=norms, hashes=hashes)


def _finish(setup: Setup, model: nn.Module, optimizer: Any, norms: list[float]) -> None:
    if setup.clip is not None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), setup.clip).item())
    optimizer.step()
    optimizer.zero_grad()


def train_ddp(rank: int, size: int, setup: Setup) -> Trained:
    """Plain DistributedDataParallel with the same optimizer."""
    from torch.nn.parallel import DistributedDataParallel

    model = setup.model()
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model)
    losses, norms, hashes = [], [], []
    for step in range(setup.steps):
        for micro in range(setup.micro_batches):
            tokens, targets = part(setup, step, micro, rank)
            if setup.no_sync and micro < setup.micro_batches - 1:
                with wrapped.no_sync():
                    loss = wrapped(tokens, targets)
                    (loss / setup.micro_batches).backward()
            else:
                loss = wrapped(tokens, targets)
                (loss / setup.micro_batches).backward()
            losses.append(loss.item())
        _finish(setup, model, optimizer, norms)
        hashes.append("")
    return taken(model, optimizer, losses=losses, norms=norms, hashes=hashes)


def distance(a: Trained, b: Trained) -> dict[str, float]:
    """Of weights and of each moment: the largest difference, and the root of the mean square."""
    out: dict[str, float] = {}
    series = {"weights": list(zip(a.weights, b.weights, strict=True))}
    for key in ("exp_avg", "exp_avg_sq"):
        series[key] = [(x[key], y[key]) for x, y in zip(a.moments, b.moments, strict=True)]
    for key, pairs in series.items():
        gaps = torch.cat([(x.double() - y.double()).flatten() for x, y in pairs])
        out[f"{key} max"] = gaps.abs().max().item()
        out[f"{key} rms"] = gaps.square().mean().sqrt().item()
    return out
