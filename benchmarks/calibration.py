"""What benchmarks/prediction.py knows of models and machine before it predicts anything.

A model's layers are timed, and their bytes counted, at two batch sizes under the plan that needs
least, several passes each, medians; another batch lies on the line between the two. The links' and
the CPU lane's rates are stated (throttles); what a copy takes beyond its bytes is measured there.
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

import torch
from torch import nn

from autohete import AutoHeteWrapper, Plan
from autohete._C import CopyDirection, HardwareProfile, UnitProfile
from autohete.demo.gpt import GPT, Block, GPTConfig
from autohete.layout import safest_plan
from autohete.measure import StepMeter
from autohete.measured_profile import build_profile
from autohete.planning import Profile, Tier
from autohete.sized_profiles import blend
from autohete.units import find_units

CHUNK = 1 << 20
PASSES = 8  # timed, after two that are not
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

    def close(self) -> None:
        self.wrapped.unwrap()


def plan_like(job: Job, *, on_device: bool) -> Plan:
    """Everything on the host and recomputed, or everything on the device."""
    plan = Plan()
    units = safest_plan(find_units(job.build()), native=True)
    for unit in units:
        if on_device:
            unit.parameters = unit.gradients = unit.optimizer_state = Tier.DEVICE
    plan.units, plan.chunk_bytes = units, CHUNK
    plan.strategy = "autohete"
    return plan


def calibrate(job: Job, batches: tuple[int, int], throttle: Throttle) -> tuple[Profile, Profile]:
    """Return profiles of the two batch sizes, hardware included."""
    hardware = HardwareProfile()
    hardware.cpu_params_per_second = throttle.updates_per_second
    hardware.h2d_bytes_per_second = hardware.d2h_bytes_per_second = throttle.link_bytes_per_second
    hardware.device_params_per_second = _device_update_rate(job, batches[0])
    small, large = (_alone(job, batch, hardware) for batch in batches)
    _add_contention(job, batches[1], throttle, hardware, large)
    small.hardware = large.hardware = hardware
    return small, large


@dataclass
class _Passes:
    """Some steps of one loop, watched."""

    profiles: list[Profile]
    outside: list[float]
    """Seconds of each step that no unit took, waits left out."""
    spans: list[tuple[Any, ...]]
    seconds: float


def _watch(loop: Loop, hardware: HardwareProfile) -> _Passes:
    run = loop.run
    loop.step()
    run.engine.record_timeline(True)
    passes = _Passes([], [], [], 0.0)
    start = time.perf_counter()
    for _ in range(PASSES):
        meter = run.plans.watch()
        begin = time.perf_counter() - _waited(run)
        loop.step()
        seconds = time.perf_counter() - _waited(run) - begin
        run.plans.stop_watching()
        passes.profiles.append(build_profile(meter, run.units, run.plans.sizes(), hardware))
        passes.outside.append(seconds - _inside(meter))
    passes.seconds = time.perf_counter() - start
    run.synchronize()
    passes.spans = run.engine.take_timeline()
    loop.close()
    return passes


def _alone(job: Job, batch: int, hardware: HardwareProfile) -> Profile:
    """The units' seconds while nothing is copied or updated, and their bytes."""
    plan = plan_like(job, on_device=True)
    passes = _watch(Loop(job, plan, batch, None), hardware)
    profile = Profile(passes.profiles[-1])
    profile.units = _medians([p.units for p in passes.profiles])
    update = sum(u.num_parameters for u in profile.units) / hardware.device_params_per_second
    profile.outside_seconds = max(median(passes.outside) - update, 0.0)
    profile.gradients_persist = False
    profile.chunk_bytes = CHUNK
    return profile


def _add_contention(
    job: Job, batch: int, throttle: Throttle, hardware: HardwareProfile, alone: Profile
) -> None:
    """What compute keeps of its speed while the CPU lane is busy, and what a chunk takes more."""
    plan = plan_like(job, on_device=False)
    passes = _watch(Loop(job, plan, batch, throttle), hardware)
    hardware.link_latency_seconds = _latency(passes.spans, throttle)
    beside = median(_compute(p) for p in passes.profiles)
    busy = sum(s[4] - s[3] for s in passes.spans if s[0] == 3) / passes.seconds
    kept = (_compute(alone) / beside - (1 - busy)) / busy
    hardware.compute_share_during_cpu = min(max(kept, 0.1), 1.0)


def _compute(profile: Profile) -> float:
    return sum(2 * u.forward_seconds + u.backward_seconds for u in profile.units)


def _waited(run: Any) -> float:
    return sum(float(v) for k, v in run.engine.counters().items() if k.startswith("wait_"))


def _inside(meter: StepMeter) -> float:
    """Seconds of the step that units took; the rest is the loss's, the hooks' and the loop's."""
    return sum(m.forward_seconds + m.backward_seconds + m.recompute_seconds for m in meter.measures)


def _medians(passes: list[list[UnitProfile]]) -> list[UnitProfile]:
    return [_median_unit(list(same)) for same in zip(*passes, strict=True)]


def _median_unit(same: list[UnitProfile]) -> UnitProfile:
    unit = UnitProfile(same[-1])
    for name in ("forward_seconds", "backward_seconds"):
        setattr(unit, name, median(getattr(u, name) for u in same))
    for name in ("activation_bytes", "checkpoint_bytes", "temporary_bytes"):
        setattr(unit, name, max(getattr(u, name) for u in same))
    return unit


def _latency(spans: list[tuple[Any, ...]], throttle: Throttle) -> float:
    """Seconds of each chunk beyond what its bytes take."""
    copies = [(s[4] - s[3], s[5]) for s in spans if s[0] in (1, 2) and s[5] >= CHUNK // 4]
    rate = throttle.link_bytes_per_second
    return max(median((t - n / rate) / -(-n // CHUNK) for t, n in copies), 0.0)


def _device_update_rate(job: Job, batch: int) -> float:
    loop = Loop(job, plan_like(job, on_device=True), batch, None)
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
