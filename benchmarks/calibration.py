"""What benchmarks/prediction.py knows of models and machine before it predicts anything.

A model's layers are timed, and their bytes counted, at two batch sizes with everything on the
device, in turn kept and recomputed, several passes each, medians; another batch lies on the line
between the two. The links' and the CPU lane's rates are stated (throttles). What a copy takes
beyond its bytes, and what compute loses beside copies and updates, is measured under two plans.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine_speed import Speed
from torch import nn

from autohete import AutoHeteWrapper, Plan
from autohete._C import CopyDirection, HardwareProfile, UnitProfile
from autohete.demo.gpt import GPT, Block, GPTConfig
from autohete.layout import safest_plan
from autohete.measure import StepMeter
from autohete.measured_profile import build_profile
from autohete.planning import ActivationRule, Profile, Tier
from autohete.sized_profiles import blend
from autohete.units import find_units

CHUNK = 1 << 20
PASSES = 6  # timed, after two that are not
_DIRECTIONS = (CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_HOST)


class Encoder(nn.Module):
    """torch's own encoder layers between an embedding and a head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _gpt(layers: int, width: int, **more: Any) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(num_layers=layers, width=width, num_heads=4, dropout=0.0, **more))


class _Paced(torch.autograd.Function):
    """Its input, after a while: forward takes that long, backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def pace(model: nn.Module, seconds_per_row: float) -> None:
    """Let each layer take a stated time more: what others do on the machine then matters less."""

    def wait(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_Paced.apply(inputs[0], seconds_per_row * inputs[0].shape[0]), *inputs[1:])

    for module in model.modules():
        if isinstance(module, (Block, nn.TransformerEncoderLayer)):
            module.norm1.register_forward_pre_hook(wait)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt 12x192": _gpt(12, 192),
    "gpt 24x128": _gpt(24, 128),
    "gpt 8x192, 8192 tied": _gpt(8, 192, vocabulary=8192, tie_head=True),
    "encoder 10x192": lambda: Encoder(10, 192, 256),
}


@dataclass(frozen=True)
class Throttle:
    """The machine that is played: rates of the lanes that are not compute."""

    link_bytes_per_second: float
    updates_per_second: float
    latency_seconds: float = 1e-4

    def apply(self, wrapped: AutoHeteWrapper) -> None:
        run: Any = wrapped.run
        run.engine.set_update_rate(self.updates_per_second)
        for direction in _DIRECTIONS:
            run.side.machine.set_link(
                direction, self.link_bytes_per_second, latency_seconds=self.latency_seconds
            )


def part_cores(cores: list[int]) -> str:
    """This thread on one core, all others (updates, copies) on the rest; says what was done."""
    main = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        mine = int(task.name) == main
        os.sched_setaffinity(int(task.name), {cores[0]} if mine or len(cores) == 1 else cores[1:])
    return f"compute on core {cores[0]}, the rest on {len(cores) - 1} more"


@dataclass(frozen=True)
class Job:
    """A model to build, and how its steps are run."""

    build: Callable[[], nn.Module]
    tokens: int
    """In a row."""
    seconds_per_row: float
    """Of pace(); 0: the layers take what they take."""
    cores: list[int]

    def model(self) -> nn.Module:
        model = self.build()
        if self.seconds_per_row:
            pace(model, self.seconds_per_row)
        return model

    def data(self, batch: int) -> torch.Tensor:
        return torch.randint(0, 256, (batch, self.tokens + 1))


class Loop:
    """A wrapped model under a given plan, and its training step."""

    def __init__(self, job: Job, plan: Plan, batch: int, throttle: Throttle | None) -> None:
        model = job.model()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.data = job.data(batch)
        self.wrapped = AutoHeteWrapper(
            model, self.optimizer, gpu_mem="16GiB", cpu_mem="8GiB", plan=plan,
            strategy=plan.strategy, num_workers=1, profile_path=None,
        ).to("cpu")  # fmt: skip
        self.run: Any = self.wrapped.run
        if throttle is not None:
            throttle.apply(self.wrapped)
        self.step()
        part_cores(job.cores)

    def step(self) -> None:
        self.wrapped(self.data[:, :-1], self.data[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recompute(self, on: bool) -> None:
        """Recompute every layer from now on, or none."""
        self.run.plans.use_rules(
            [
                ActivationRule.RECOMPUTE if on and unit.is_layer else ActivationRule.KEEP
                for unit in self.run.units
            ]
        )

    def close(self) -> None:
        self.wrapped.unwrap()


def plan_like(job: Job, *, parameters: Tier, state: Tier) -> Plan:
    """Every layer recomputed; parameters, and gradients and state, in a given place."""
    plan = Plan()
    units = safest_plan(find_units(job.build()), native=True)
    for unit in units:
        unit.parameters = parameters if unit.parameters == Tier.HOST else Tier.DEVICE
        unit.gradients = unit.optimizer_state = state
    plan.units, plan.chunk_bytes = units, CHUNK
    plan.strategy = "autohete"
    return plan


def calibrate(
    job: Job, batches: tuple[int, int], throttle: Throttle, speed: Speed | None = None
) -> tuple[Profile, Profile]:
    """Return profiles of the two batch sizes, hardware included; `speed` is read meanwhile."""
    hardware = HardwareProfile()
    hardware.cpu_params_per_second = throttle.updates_per_second
    hardware.h2d_bytes_per_second = hardware.d2h_bytes_per_second = throttle.link_bytes_per_second
    hardware.device_params_per_second = _device_update_rate(job, batches[0])
    profiles = _alone(job, batches, hardware, speed)
    _add_contention(job, batches[1], throttle, hardware)
    for profile in profiles:
        profile.hardware = hardware
    return profiles


def _alone(
    job: Job, batches: tuple[int, int], hardware: HardwareProfile, speed: Speed | None
) -> tuple[Profile, Profile]:
    """The units' seconds while nothing is copied or updated, and their bytes.

    Both batches, kept and recomputed, take turns: what else happens to the machine falls on all.
    """
    plan = plan_like(job, parameters=Tier.DEVICE, state=Tier.DEVICE)
    loop = Loop(job, plan, batches[1], None)
    data = {batch: job.data(batch) for batch in batches}
    seen: dict[tuple[int, bool], list[_Pass]] = {}
    for _ in range(2 + PASSES):
        if speed is not None:
            speed.calibrate()
        for batch in batches:
            for recompute in (True, False):
                loop.data = data[batch]
                loop.recompute(recompute)
                seen.setdefault((batch, recompute), []).append(_watch(loop, hardware))
            seen[batch, False][-1].outside = _outside(loop, seen[batch, False][-1])
    loop.close()
    small, large = (_together(seen[b, True][2:], seen[b, False][2:], hardware) for b in batches)
    return small, large


@dataclass
class _Pass:
    """One watched step."""

    profile: Profile
    inside: float
    """Seconds that units took."""
    outside: float = 0.0
    """Seconds of a step that no unit took."""


def _watch(loop: Loop, hardware: HardwareProfile) -> _Pass:
    run = loop.run
    meter = run.plans.watch()
    loop.step()
    run.plans.stop_watching()
    return _Pass(build_profile(meter, run.units, run.plans.sizes(), hardware), _inside(meter))


def _outside(loop: Loop, kept: _Pass) -> float:
    """Of the same step once more: watching takes some percent itself, most of it outside."""
    start = time.perf_counter()
    loop.step()
    return time.perf_counter() - start - kept.inside


def _together(again: list[_Pass], kept: list[_Pass], hardware: HardwareProfile) -> Profile:
    """Bytes as the recomputing passes show them; seconds from both.

    Recomputing takes what a pass that recomputes takes more.
    """
    profile = Profile(again[-1].profile)
    bytes_of = _medians([p.profile.units for p in again])
    seconds_of = _medians([p.profile.units for p in kept])
    for unit, plain in zip(bytes_of, seconds_of, strict=True):
        more = unit.forward_seconds + unit.backward_seconds + unit.recompute_seconds
        unit.forward_seconds = plain.forward_seconds
        unit.backward_seconds = plain.backward_seconds
        unit.recompute_seconds = max(more - plain.forward_seconds - plain.backward_seconds, 0.0)
    profile.units = bytes_of
    update = sum(u.num_parameters for u in bytes_of) / hardware.device_params_per_second
    profile.outside_seconds = max(median(p.outside for p in kept) - update, 0.0)
    profile.gradients_persist = False
    profile.chunk_bytes = CHUNK
    return profile


def _inside(meter: StepMeter) -> float:
    """Seconds of the step that units took; the rest is the loss's, the hooks' and the loop's."""
    return sum(m.forward_seconds + m.backward_seconds + m.recompute_seconds for m in meter.measures)


def _medians(passes: list[list[UnitProfile]]) -> list[UnitProfile]:
    return [_median_unit(list(same)) for same in zip(*passes, strict=True)]


def _median_unit(same: list[UnitProfile]) -> UnitProfile:
    unit = UnitProfile(same[-1])
    for name in ("forward_seconds", "backward_seconds", "recompute_seconds"):
        setattr(unit, name, median(getattr(u, name) for u in same))
    for name in ("activation_bytes", "checkpoint_bytes", "temporary_bytes"):
        setattr(unit, name, max(getattr(u, name) for u in same))
    return unit


@dataclass
class _Beside:
    """One step under a plan whose lanes are busy, and the same compute alone."""

    alone: float
    free: float
    """Seconds of compute with neither lane busy; beside an update, a copy, both."""
    updating: float
    copying: float
    both: float


def _add_contention(job: Job, batch: int, throttle: Throttle, hardware: HardwareProfile) -> None:
    """What compute keeps of its speed beside updates and beside copies, and what a copy takes more.

    Hooks are in it: what they take is part of what compute loses.
    """
    alone = Loop(job, plan_like(job, parameters=Tier.DEVICE, state=Tier.DEVICE), batch, None)
    seen, copies = [], []
    for parameters in (Tier.HOST, Tier.DEVICE):
        loop = Loop(job, plan_like(job, parameters=parameters, state=Tier.HOST), batch, throttle)
        for _ in range(2):  # in turn, for the machine's own speed changes
            seconds = _pass_seconds(alone)
            seen.append(_beside(loop, seconds))
        copies += _more_than_bytes(loop, throttle)
        loop.close()
    alone.close()
    hardware.link_latency_seconds = max(median(copies), 0.0)
    _, hardware.compute_share_during_cpu, hardware.compute_share_during_copy = min(
        (sum((_work(b, u, c) / b.alone - 1) ** 2 for b in seen), u, c)
        for u in np.linspace(0.5, 1, 51)
        for c in np.linspace(0.5, 1, 51)
    )


def _work(beside: _Beside, updating: float, copying: float) -> float:
    """Seconds that the compute would take alone, given the shares."""
    more = updating * (beside.updating + copying * beside.both)
    return beside.free + more + copying * beside.copying


def _pass_seconds(loop: Loop, count: int = 3) -> float:
    """Seconds of forward and backward."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        loop.wrapped(loop.data[:, :-1], loop.data[:, 1:]).backward()
        seconds.append(time.perf_counter() - start)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return median(seconds)


def _spans_of(loop: Loop, count: int) -> tuple[float, float, list[tuple[Any, ...]]]:
    """Begin and end of some steps, and what the engine did."""
    engine = loop.run.engine
    engine.record_timeline(True)
    engine.take_timeline()
    begin = time.perf_counter()
    for _ in range(count):
        loop.step()
    end = time.perf_counter()
    loop.run.synchronize()
    engine.record_timeline(False)
    return begin, end, engine.take_timeline()


def _beside(loop: Loop, alone: float, count: int = 3) -> _Beside:
    """See what the lanes did while the device computed."""
    loop.step()
    loop.step()
    begin, end, spans = _spans_of(loop, count)
    resolution = 1e-4
    waiting, updating, copying = np.zeros((3, int((end - begin) / resolution) + 1), bool)
    rows = {0: waiting, 3: updating, 1: copying, 2: copying}
    for lane, _, _, start, stop, _ in spans:
        first, last = (int(max(t - begin, 0.0) / resolution) for t in (start, stop))
        rows[lane][first:last] = True
    of = [
        float((~waiting & (updating == u) & (copying == c)).sum()) * resolution / count
        for u, c in ((False, False), (True, False), (False, True), (True, True))
    ]
    return _Beside(alone, *of)


def _more_than_bytes(loop: Loop, throttle: Throttle) -> list[float]:
    """Seconds that copies took beyond their bytes, of each of the parts that they are made in."""
    tensors = [len(unit.parameters) for unit in loop.run.units]
    more = []
    for lane, unit, _, start, stop, num_bytes in _spans_of(loop, 3)[2]:
        if lane in (1, 2) and num_bytes >= CHUNK // 4:
            parts = max(-(-num_bytes // CHUNK), tensors[unit] if lane == 2 else 1)
            more.append((stop - start - num_bytes / throttle.link_bytes_per_second) / parts)
    return more


def _device_update_rate(job: Job, batch: int) -> float:
    loop = Loop(job, plan_like(job, parameters=Tier.DEVICE, state=Tier.DEVICE), batch, None)
    seconds = []
    for _ in range(4):
        loop.wrapped(loop.data[:, :-1], loop.data[:, 1:]).backward()
        start = time.perf_counter()
        loop.optimizer.step()
        seconds.append(time.perf_counter() - start)
        loop.optimizer.zero_grad()
    count = sum(p.numel() for p in loop.wrapped.parameters())
    loop.close()
    return count / median(seconds)


def at_batch(profiles: tuple[Profile, Profile], batches: tuple[int, int], batch: int) -> Profile:
    """Return the profile of a batch that was not measured."""
    share = (batch - batches[0]) / (batches[1] - batches[0])
    return blend(*profiles, share)
