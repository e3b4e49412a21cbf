"""Plain training on the GPU, updated by CPUAdamW on CPU copies: to be equalled to the bit.

Forward and backward are the same kernels on the same device; the update is the same rule on the
same hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import batch, make_gpt
from oracle import Result, adamw, forced_plan
from torch import nn
from torch.optim import Optimizer

from autohete import AutoHeteWrapper

# Of the loop: called with the model, the optimizer, and the step's number.
Edit = Callable[[nn.Module, Optimizer, int], None]


class CopyingOptimizer:
    """Steps `make(model)` on a CPU copy of the model and copies the result back."""

    def __init__(self, model: nn.Module, copied: nn.Module, make: Callable[..., Optimizer]) -> None:
        self.pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
        self.inner = make(copied)

    def step(self) -> None:
        for p, q in self.pairs:
            q.data.copy_(p.data)
            q.grad = None if p.grad is None else p.grad.cpu()
        self.inner.step()
        for p, q in self.pairs:
            p.data.copy_(q.data)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p, _ in self.pairs:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        return next(self.inner.state[q] for p, q in self.pairs if p is parameter)


def gpu_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = batch(step)
    return tokens.cuda(), targets.cuda()


def gpu_loop(model: nn.Module, optimizer: Any, step: int) -> float:
    loss = model(*gpu_batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_plain(
    steps: int, build: Callable[[], nn.Module] = make_gpt, loop: Any = gpu_loop
) -> tuple[list[float], nn.Module, CopyingOptimizer]:
    model, copied = build().cuda(), build()
    optimizer = CopyingOptimizer(model, copied, adamw)
    torch.manual_seed(7)
    return [loop(model, optimizer, step) for step in range(steps)], model, optimizer


def train_wrapped(
    steps: int,
    kinds: dict[int, str] | str | None,
    build: Callable[[], nn.Module] = make_gpt,
    loop: Any = gpu_loop,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    **keywords: Any,
) -> Result:
    """Train under the plan that places units by `kinds` (None: planned); ends on the CPU."""
    model = build()
    opt = optimizer(model)
    if kinds is not None:
        keywords["plan"] = partial(forced_plan, kinds=kinds)(model)
    keywords = {"gpu_mem": "2GiB", "cpu_mem": "1GiB", "profile_path": None, **keywords}
    wrapped = AutoHeteWrapper(model, opt, **keywords).cuda()
    torch.manual_seed(7)
    losses = [loop(wrapped, opt, step) for step in range(steps)]
    extra = {"report": wrapped.report(), "plan": wrapped.plan}
    wrapped.unwrap("cpu")
    return Result(losses, model, opt, extra)


def assert_equal_to_plain(ours: Result, plain: tuple[list[float], nn.Module, Any]) -> None:
    losses, model, optimizer = plain
    assert ours.losses == losses
    for p, q in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.cpu())
        state, expected = ours.optimizer.state[p], optimizer.state(q)
        for key in ("exp_avg", "exp_avg_sq", "master", "step"):
            if key in expected:
                assert torch.equal(state[key], expected[key]), key
