"""A short training whose last steps are traced: what `autohete trace` shows without a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autohete.demo.gpt import GPTConfig
from autohete.demo.training import Demo, DemoOptions, train

_UNTRACED = 3  # the first step is measured, the second moves to its plan, the third warms up


def traced_run(
    *,
    steps: int,
    gpu_mem: int | None = None,
    device: str = "host",
    on_step: Callable[[int], None] = lambda step: None,
) -> Any:
    """Train a small GPT and return its report, with a trace of all but the first steps."""
    options = DemoOptions(
        model=GPTConfig(num_layers=6), steps=steps, gpu_mem=gpu_mem, device=device
    )
    demo = Demo(options)
    job = demo.prepare()

    def begin_trace(step: int, loss: float, model: Any) -> None:
        if step + 1 == _UNTRACED:
            model.trace()
        on_step(step)

    train(job, steps, options.torch_device, begin_trace)
    model: Any = job.model
    model.synchronize()
    report = model.report()
    model.unwrap()
    return report
