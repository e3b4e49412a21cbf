"""Train on CUDA and compare with plain CPU training: made for a CUDA emulation, right on a GPU too.

An emulation that runs CUDA on the CPU can stand in for a GPU where there is none: it is preloaded
into a process with a CUDA build of torch, which then finds a device. Emulations do only part of
CUDA: memory, copies, streams, events, callbacks and fp32 matrix products are enough here, all
other kernels may do nothing. So the network is nothing but bias-free matrix products, driven by
`y.backward(G)`, and all optimizer state is on the host, where autohete's own AdamW updates it. Run

    LD_PRELOAD="libcudart libcuda libnvidia-ml libcublas of the emulation" \
        python benchmarks/cuda_emulation.py [--steps 20] [--json FILE]

in an environment where autohete was built for a CUDA torch. Its NCCL is not needed. Where its
events complete only when something synchronizes with them, put a library of one function in front,
which makes asking for an event wait for it:

    int cudaEventQuery(void* event) { return cudaEventSynchronize(event); }

For each kind of plan the model is trained twice. In the first run every step is followed by a plain
CPU model: its weights, updated by autohete.CPUAdamW with the gradients seen on the device, must
be bit-equal to the device's, and the gradients it computes itself must agree to 2e-6 of the largest
one. The second run touches nothing between the steps, so that copies, updates and compute overlap;
its weights and moments must be bit-equal to the first run's. Last, the distance to a CPU training
that uses its own gradients is given. Exits with 1 when anything does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autohete import AutoHeteWrapper, CPUAdamW, Plan
from autohete.planning import ActivationRule, Tier, UnitPlan
from autohete.units import find_units

GRADIENT_TOLERANCE = 2e-6
WIDTH, HIDDEN, LAYERS, ROWS = 64, 160, 6, 48
# (name, parameters on the host, recompute)
KINDS = (("state", False, False), ("state, recompute", False, True))
KINDS += (("parameters + state", True, False), ("parameters + state, recompute", True, True))


class Product(nn.Module):
    """x @ W, W of shape (inputs, outputs): its gradient is one matrix product as well."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Network(nn.Module):
    """Products only: one in front, layers of two, one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Product(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(Product(WIDTH, HIDDEN), Product(HIDDEN, WIDTH)) for _ in range(LAYERS)
        )
        self.end = Product(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


@dataclass
class Outcome:
    """What one kind of plan gave. Distances are largest absolute differences."""

    kind: str
    window: int
    steps: int
    gradients: float  # to the CPU's from the same weights, as a share of the largest one
    weights_to_followed: float  # to CPUAdamW with the device's gradients: 0 expected
    overlapped_to_followed: float  # second run's weights and moments to the first's: 0 expected
    weights_to_cpu_training: float
    weight_moved: float  # how far training moved them, for scale
    h2d_bytes: int
    d2h_bytes: int
    device_peak_bytes: int

    @property
    def holds(self) -> bool:
        exact = self.weights_to_followed == 0 and self.overlapped_to_followed == 0
        return exact and self.gradients <= GRADIENT_TOLERANCE and self.h2d_bytes > 0


def make() -> tuple[Network, CPUAdamW]:
    torch.manual_seed(1)
    model = Network()
    return model, CPUAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, gradient = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    return x, gradient


def plan_of(model: nn.Module, offload: bool, recompute: bool, window: int) -> Plan:
    plan = Plan()
    plan.window, plan.chunk_bytes = window, 16384
    placements = []
    for unit in find_units(model):
        placement = UnitPlan()
        placement.parameters = Tier.HOST if offload else Tier.DEVICE
        placement.gradients = placement.optimizer_state = Tier.HOST
        again = recompute and unit.is_layer
        placement.activations = ActivationRule.RECOMPUTE if again else ActivationRule.KEEP
        placements.append(placement)
    plan.units = placements
    return plan


def backward(model: nn.Module, step: int, device: str) -> None:
    x, gradient = (t.to(device) for t in batch(step))
    model(x).backward(gradient)


def wrap(offload: bool, recompute: bool, window: int) -> tuple[AutoHeteWrapper, CPUAdamW]:
    model, optimizer = make()
    plan = plan_of(model, offload, recompute, window)
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="1GiB", cpu_mem="256MiB", plan=plan, profile_path=None
    )
    return wrapped.cuda(), optimizer


def distance(ours: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(ours, others, strict=True)
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient after backward, expected one")
    return parameter.grad


def everything(model: nn.Module, optimizer: CPUAdamW) -> list[Tensor]:
    moments = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *moments]


def followed_run(steps: int, *shape: Any) -> tuple[list[Tensor], float, float]:
    """Return all tensors at the end, and the largest distances of gradients and weights."""
    model, optimizer = wrap(*shape)
    follower, following = make()
    gradients = weights = 0.0
    for step in range(steps):
        backward(model, step, "cuda")
        backward(follower, step, "cpu")
        for p, q in zip(model.parameters(), follower.parameters(), strict=True):
            seen, own = gradient_of(p).cpu(), gradient_of(q)
            gradients = max(gradients, distance([seen], [own]) / own.abs().max().item())
            q.grad = seen
        for each in (optimizer, following):
            each.step()
            each.zero_grad()
        weights = max(weights, distance(list(model.parameters()), list(follower.parameters())))
    weights = max(weights, distance(everything(model, optimizer), everything(follower, following)))
    model.unwrap("cpu")
    return [t.detach() for t in everything(model.module, optimizer)], gradients, weights


def overlapped_run(steps: int, *shape: Any) -> tuple[list[Tensor], dict[str, int], int]:
    """Return all tensors at the end, the engine's counters and the device peak in bytes."""
    model, optimizer = wrap(*shape)
    model.run.side.reset_peak()
    for step in range(steps):
        backward(model, step, "cuda")
        optimizer.step()
        optimizer.zero_grad()
    model.synchronize()
    report = model.report()
    counters = {"h2d_bytes": report.h2d_bytes, "d2h_bytes": report.d2h_bytes}
    peak = report.device_peak_measured_bytes
    model.unwrap("cpu")
    return [t.detach() for t in everything(model.module, optimizer)], counters, peak


def cpu_training(steps: int) -> Network:
    model, optimizer = make()
    for step in range(steps):
        backward(model, step, "cpu")
        optimizer.step()
        optimizer.zero_grad()
    return model


def measure(kind: tuple[str, bool, bool], window: int, steps: int, cpu: Network) -> Outcome:
    name, *places = kind
    followed, gradients, weights = followed_run(steps, *places, window)
    overlapped, counters, peak = overlapped_run(steps, *places, window)
    count = len(list(cpu.parameters()))
    return Outcome(
        kind=name,
        window=window,
        steps=steps,
        gradients=gradients,
        weights_to_followed=weights,
        overlapped_to_followed=distance(overlapped, followed),
        weights_to_cpu_training=distance(overlapped[:count], list(cpu.parameters())),
        weight_moved=distance(overlapped[:count], list(make()[0].parameters())),
        **counters,
        device_peak_bytes=peak,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: preload an emulation, or run this on a GPU", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    cpu = cpu_training(arguments.steps)
    outcomes = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.steps} steps")
    columns = "gradients", "weights", "overlapped", "to CPU training", "moved", "H2D", "D2H", "peak"
    print(f"{'plan':40}" + "".join(f"{c:>16}" for c in columns))
    for kind in KINDS:
        for window in (1, 2) if kind[1] else (2,):
            o = measure(kind, window, arguments.steps, copy.deepcopy(cpu))
            outcomes.append(o)
            figures = (o.gradients, o.weights_to_followed, o.overlapped_to_followed)
            figures += (o.weights_to_cpu_training, o.weight_moved)
            sizes = (o.h2d_bytes, o.d2h_bytes, o.device_peak_bytes)
            line = f"{kind[0] + f', window {window}':40}"
            line += "".join(f"{f:16.2e}" for f in figures) + "".join(f"{s:16}" for s in sizes)
            print(line, "" if o.holds else "  FAILED", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    return 0 if all(o.holds for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
