"""Train the same model under plain PyTorch and under autohete, and compare to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from models import batch, make_gpt
from torch import nn
from torch.optim import Optimizer

from autohete import AutoHeteWrapper, CPUAdamW, Plan
from autohete.planning import ActivationRule, Tier, UnitPlan
from autohete.units import find_units


@dataclass
class Result:
    losses: list[float]
    model: nn.Module
    optimizer: Optimizer
    extra: dict[str, Any] = field(default_factory=dict)


def unit_plan(kind: str) -> UnitPlan:
    """Kinds: "device", "state" (state on the host), "all" (parameters too); "+c" recomputes."""
    plan = UnitPlan()
    name, _, recompute = kind.partition("+")
    plan.parameters = Tier.HOST if name == "all" else Tier.DEVICE
    plan.optimizer_state = plan.gradients = Tier.DEVICE if name == "device" else Tier.HOST
    plan.activations = ActivationRule.RECOMPUTE if recompute else ActivationRule.KEEP
    return plan


def forced_plan(model: nn.Module, kinds: dict[int, str] | str, window: int = 2) -> Plan:
    """A plan with the given kinds by unit index (others on the device), or one kind for all."""
    plan = Plan()
    plan.window = window
    plan.chunk_bytes = 4096
    placements = []
    for index, unit in enumerate(find_units(model)):
        kind = kinds if isinstance(kinds, str) else kinds.get(index, "device")
        if unit.is_container:
            kind = kind.replace("all", "state")
        if not unit.is_layer:
            kind = kind.partition("+")[0]
        placements.append(unit_plan(kind))
    plan.units = placements
    return plan


def adamw(model: nn.Module, **kwargs: Any) -> CPUAdamW:
    """Two groups, as users have them: no decay for vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return CPUAdamW(groups, lr=3e-3, **kwargs)


Loop = Callable[[nn.Module, Optimizer, int], float]


def plain_loop(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    tokens, targets = batch(step)
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    *,
    wrap: dict[str, Any] | None,
    steps: int = 8,
    loop: Loop = plain_loop,
    build: Callable[[], nn.Module] = make_gpt,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    prepare: Callable[[AutoHeteWrapper], None] | None = None,
) -> Result:
    """Train; `wrap` are the wrapper's keywords, or None for plain PyTorch. Unwraps at the end."""
    model = build()
    opt = optimizer(model)
    trained: nn.Module = model
    if wrap is not None:
        keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **wrap}
        if callable(keywords.get("plan")):
            keywords["plan"] = keywords["plan"](model)
        trained = AutoHeteWrapper(model, opt, **keywords).to("cpu")
        if prepare is not None:
            prepare(trained)
    torch.manual_seed(7)
    losses = [loop(trained, opt, step) for step in range(steps)]
    extra = {}
    if wrap is not None:
        extra = {"report": trained.report(), "plan": trained.plan}
        trained.unwrap()
    return Result(losses, model, opt, extra)


STATE_KEYS: Sequence[str] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "step")


def assert_bit_equal(ours: Result, reference: Result) -> None:
    """Losses, weights, and both moments (and masters and step counters where there are any)."""
    assert ours.losses == reference.losses
    pairs = zip(ours.model.named_parameters(), reference.model.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        assert torch.equal(p, q), f"{name}: weights differ"
        state, expected = ours.optimizer.state.get(p, {}), reference.optimizer.state.get(q, {})
        assert state.keys() == expected.keys(), name
        for key in STATE_KEYS:
            if key in expected:
                assert torch.equal(state[key], expected[key]), f"{name}: {key} differs"
    for (name, a), (_, b) in zip(
        ours.model.named_buffers(), reference.model.named_buffers(), strict=True
    ):
        assert torch.equal(a, b), f"buffer {name} differs"


def compare_with_plain(loop: Loop, kind: str, *, prepare: Any = None, wrap: Any = None,
                       **training: Any) -> dict[str, Any]:  # fmt: skip
    """Train under a forced plan of one kind and plainly, to the bit; return the engine's counts.

    Args:
        wrap: keywords of the wrapper.
        training: keywords of train() for both.
    """
    counted: dict[str, Any] = {}

    def watched(model: nn.Module, optimizer: Optimizer, step: int) -> float:
        loss = loop(model, optimizer, step)
        if isinstance(model, AutoHeteWrapper):
            counted.update(model.run.engine.counters())
        return loss

    keywords = {"plan": partial(forced_plan, kinds=kind), **(wrap or {})}
    ours = train(wrap=keywords, loop=watched, prepare=prepare, **training)
    assert_bit_equal(ours, train(wrap=None, loop=loop, **training))
    return counted
