"""The main job: train a GPT on real text within a small device budget, and measure what happened.

`train` is the loop a user writes; it is the same with autohete and without. Everything else here
makes its inputs, measures, or compares with plain PyTorch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autohete.demo.gpt import GPT, GPTConfig, generate
from autohete.demo.need import DeviceNeed, device_bytes_that_train, device_need
from autohete.demo.text import Text, batches, standard_library_text
from autohete.distributed import rank_of_launch

Batches = Iterator[tuple[Tensor, Tensor]]
OnStep = Callable[[int, float, Any], None]  # step, loss, the model as the loop sees it
_HELD_OUT_BATCHES = 8
_PROMPT = b"def "
_SEEDS_APART = 1_000_003  # of the ranks' data


@dataclass(frozen=True)
class DemoOptions:
    """What the command line chooses."""

    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 150
    batch: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    device: str = "host"
    """"host" (the host device, any machine), "cuda", or "plain": plain PyTorch on the CPU."""
    gpu_mem: int | None = None
    """Bytes; None: a third of what plain training needs, or the least that a small model trains in.
    """
    cpu_mem: int | None = None
    sample_bytes: int = 160

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"demo: steps is {self.steps}, expected 1 or more")
        if self.device not in ("host", "cuda", "plain"):
            raise ValueError(f"demo: device is {self.device!r}, expected host, cuda or plain")

    @property
    def torch_device(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"


@dataclass(frozen=True)
class Differences:
    """Largest absolute difference from plain PyTorch over all parameters."""

    weights: float
    exp_avg: float
    exp_avg_sq: float

    @property
    def largest(self) -> float:
        return max(self.weights, self.exp_avg, self.exp_avg_sq)


@dataclass
class DemoResult:
    """Everything the end report shows."""

    num_parameters: int
    need: DeviceNeed
    gpu_mem: int
    loss_before: float
    loss_after: float
    seconds: float
    tokens: int
    sample: str
    report: Any = None
    """What `model.report()` returned; None without autohete."""
    differences: Differences | None = None


@dataclass
class Job:
    """One model at its initial weights, its optimizer and its data, ready to train."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    data: Batches


def train(
    job: Job, steps: int, device: str, on_step: OnStep = lambda step, loss, model: None
) -> None:
    """The user's loop."""
    job.model.train()
    for step in range(steps):
        tokens, targets = next(job.data)
        loss = job.model(tokens.to(device), targets.to(device))
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.scheduler.step()
        on_step(step, loss.item(), job.model)


class Demo:
    """The parts in the order they run; the command line shows something between them."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.text: Text = standard_library_text()
        torch.manual_seed(options.seed)
        self.initial = GPT(options.model)
        self.need = device_need(self.initial, *next(self._batches()))
        self.gpu_mem = options.gpu_mem or self._default_gpu_mem()

    def _default_gpu_mem(self) -> int:
        third = self.need.total // 3
        if self.options.device == "plain":
            return third
        batch = next(self._batches())
        return device_bytes_that_train(self.initial, *batch, third, most=2 * self.need.total)

    def prepare(self) -> Job:
        """Wrap the model, unless the device is "plain"."""
        options = self.options
        model: Any = copy.deepcopy(self.initial)
        optimizer = AdamW(model.parameters(), lr=options.learning_rate)
        if options.device != "plain":
            from autohete import AutoHeteWrapper

            model = AutoHeteWrapper(
                model, optimizer, gpu_mem=self.gpu_mem, cpu_mem=options.cpu_mem
            ).to(options.torch_device)
        return self.job(model, optimizer)

    def run(self, job: Job, on_step: OnStep) -> DemoResult:
        """Train, evaluate before and after, generate."""
        options = self.options
        loss_before = self.held_out_loss(self.initial, "cpu")
        torch.manual_seed(options.seed)  # dropout draws from here on
        start = time.perf_counter()
        train(job, options.steps, options.torch_device, on_step)
        if options.device != "plain":
            job.model.synchronize()  # type: ignore[operator]
        seconds = time.perf_counter() - start
        report = None if options.device == "plain" else job.model.report()  # type: ignore[operator]
        return DemoResult(
            num_parameters=sum(p.numel() for p in self.initial.parameters()),
            need=self.need,
            gpu_mem=self.gpu_mem,
            loss_before=loss_before,
            loss_after=self.held_out_loss(job.model, options.torch_device),
            seconds=seconds,
            tokens=options.steps * options.batch * options.model.context,
            sample=self._sample(job.model),
            report=report,
        )

    def check(self, job: Job, on_step: OnStep) -> Differences:
        """Train the same model under plain PyTorch with CPUAdamW and compare it with `job`."""
        options = self.options
        from autohete import CPUAdamW

        model = copy.deepcopy(self.initial)
        reference = self.job(model, CPUAdamW(model.parameters(), lr=options.learning_rate))
        torch.manual_seed(options.seed)
        train(reference, options.steps, "cpu", on_step)
        return differences(job, reference)

    def held_out_loss(self, model: nn.Module, device: str) -> float:
        """Mean loss in nats per byte over the same held-out batches each time."""
        data = batches(
            self.text.held_out, batch=self.options.batch, context=self.options.model.context, seed=1
        )
        was_training = model.training
        model.eval()
        with torch.no_grad():
            losses = [
                model(*(tensor.to(device) for tensor in next(data))).item()
                for _ in range(_HELD_OUT_BATCHES)
            ]
        model.train(was_training)
        return math.fsum(losses) / len(losses)

    def job(self, model: nn.Module, optimizer: Optimizer) -> Job:
        scheduler = LambdaLR(optimizer, _warmup_then_cosine(self.options.steps))
        return Job(model, optimizer, scheduler, self._batches())

    def _batches(self) -> Batches:
        """Random places of the text; each of several ranks (torchrun) draws its own."""
        options = self.options
        return batches(
            self.text.training,
            batch=options.batch,
            context=options.model.context,
            seed=options.seed + _SEEDS_APART * rank_of_launch(),
        )

    def _sample(self, model: nn.Module) -> str:
        options = self.options
        model.eval()
        generator = torch.Generator(options.torch_device).manual_seed(options.seed)
        sample = generate(model, _PROMPT, options.sample_bytes, options.model.context, generator)
        return sample.decode("utf-8", errors="replace")


def differences(job: Job, reference: Job) -> Differences:
    """Compare every weight and both moments of two trained jobs."""
    pairs = list(zip(job.model.parameters(), reference.model.parameters(), strict=True))
    return Differences(
        weights=max(_distance(ours, plain) for ours, plain in pairs),
        exp_avg=max(_state_distance(job, reference, "exp_avg", *pair) for pair in pairs),
        exp_avg_sq=max(_state_distance(job, reference, "exp_avg_sq", *pair) for pair in pairs),
    )


def _state_distance(job: Job, reference: Job, key: str, ours: Tensor, plain: Tensor) -> float:
    return _distance(job.optimizer.state[ours][key], reference.optimizer.state[plain][key])


def _distance(a: Tensor, b: Tensor) -> float:
    gap = (a.detach().double().cpu() - b.detach().double().cpu()).abs().max().item()
    return math.inf if math.isnan(gap) else gap


def _warmup_then_cosine(steps: int) -> Callable[[int], float]:
    warmup = min(20, max(1, steps // 5))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
