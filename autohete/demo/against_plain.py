"""Gradients, moments and weights of a run against plain fp32 PyTorch, layer by layer.

The same model, data and random numbers twice: under autohete in the precision and budget asked for,
and in fp32 as plain PyTorch. In fp32 every difference is 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autohete.demo.training import Demo, DemoOptions, Job
from autohete.optim import CPUAdamW
from autohete.units import find_units

KINDS = ("gradient", "exp_avg", "exp_avg_sq", "weight")
Tensors = dict[str, dict[str, Tensor]]
"""kind -> name of the unit -> everything of that kind in it, flat, in double precision."""


@dataclass(frozen=True)
class Difference:
    """One kind of tensor of one unit: its norms, and how far the run's is from the plain one's."""

    unit: str
    kind: str
    norm: float
    plain_norm: float
    relative: float
    """Norm of the difference over the plain norm."""
    cosine: float
    largest: float
    """Largest absolute difference of one element."""

    @classmethod
    def of(cls, unit: str, kind: str, ours: Tensor, plain: Tensor) -> Difference:
        """Compare two flat tensors in double precision."""
        norm, plain_norm = float(ours.norm()), float(plain.norm())
        gap = ours - plain
        both = norm * plain_norm
        return cls(
            unit=unit,
            kind=kind,
            norm=norm,
            plain_norm=plain_norm,
            relative=_ratio(float(gap.norm()), plain_norm),
            cosine=1.0 if not gap.any() else float(ours @ plain) / both if both else 0.0,
            largest=float(gap.abs().max()) if gap.numel() else 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return asdict(self)


def compare_with_plain(
    options: DemoOptions,
    precision: str = "fp32",
    on_step: Callable[[str, int], None] = lambda which, step: None,
) -> list[Difference]:
    """Train both and compare them after the last step, its gradients included."""
    demo = Demo(options)
    ours = _train(demo, _wrapped(demo, precision), options.torch_device, on_step)
    plain_model = copy.deepcopy(demo.initial)
    plain = demo.job(plain_model, CPUAdamW(plain_model.parameters(), lr=options.learning_rate))
    reference = _train(demo, plain, "cpu", on_step)
    return [
        Difference.of(unit, kind, ours[kind][unit], reference[kind][unit])
        for unit in reference["weight"]
        for kind in KINDS
    ]


def _wrapped(demo: Demo, precision: str) -> Job:
    from autohete import AutoHeteWrapper

    model: Any = copy.deepcopy(demo.initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=demo.options.learning_rate)
    model = AutoHeteWrapper(
        model,
        optimizer,
        gpu_mem=demo.gpu_mem,
        cpu_mem=demo.options.cpu_mem,
        precision=precision,
        profile_path=None,
    ).to(demo.options.torch_device)
    return demo.job(model, optimizer)


def _train(demo: Demo, job: Job, device: str, on_step: Callable[[str, int], None]) -> Tensors:
    """The user's loop, whose last gradients are kept."""
    torch.manual_seed(demo.options.seed)
    job.model.train()
    which = "plain PyTorch" if isinstance(job.optimizer, CPUAdamW) else "autohete"
    for step in range(demo.options.steps):
        job.optimizer.zero_grad()
        tokens, targets = next(job.data)
        job.model(tokens.to(device), targets.to(device)).backward()
        job.optimizer.step()
        job.scheduler.step()
        on_step(which, step)
    return _collect(job)


def _collect(job: Job) -> Tensors:
    model: Any = job.model
    module: nn.Module = getattr(model, "module", model)
    if module is not model:
        model.synchronize()
    found: Tensors = {kind: {} for kind in KINDS}
    for unit in find_units(module):
        states = [job.optimizer.state[p] for p in unit.parameters]
        # Half parameters have fp32 masters, which are the weights that are trained.
        weights = [state.get("master", p) for state, p in zip(states, unit.parameters, strict=True)]
        found["weight"][unit.name] = _flat(weights)
        found["gradient"][unit.name] = _flat([p.grad for p in unit.parameters])
        for kind in ("exp_avg", "exp_avg_sq"):
            found[kind][unit.name] = _flat([state[kind] for state in states])
    return found


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([t.detach().double().cpu().flatten() for t in tensors if t is not None])


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf
