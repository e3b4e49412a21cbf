"""`autohete demo`: train a small GPT in a third of the device memory it needs, and show it."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autohete.cli.output import print_json, print_rows
from autohete.cli.progress import ends_a_tenth
from autohete.cli.types import SIZE, of_the_command_line

if TYPE_CHECKING:
    from rich.console import Console

    from autohete.demo.training import Demo, DemoOptions, DemoResult, OnStep

_EPILOG = """\b
Examples:
  autohete demo                        about two minutes on two cores
  autohete demo --check --steps 50     and compare with plain PyTorch, bit for bit
  autohete demo --device cuda          the same on a GPU
  autohete demo --gpu-mem 64MiB        a budget of your own
  torchrun --nproc-per-node 2 -m autohete demo    two ranks, each with its share of the data
"""

# Of model.report(), for --json.
_FIGURES = (
    "device_budget_bytes",
    "device_peak_predicted_bytes",
    "device_peak_measured_bytes",
    "step_seconds_predicted",
    "step_seconds_measured",
    "h2d_bytes",
    "d2h_bytes",
    "num_steps",
)


@click.command(epilog=_EPILOG)
@click.option("--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--plain", is_flag=True, help="Plain PyTorch on the CPU, without autohete.")
@click.option("--steps", type=click.IntRange(1), default=150, show_default=True)
@click.option(
    "--gpu-mem",
    type=SIZE,
    help='Device memory, e.g. "64MiB".  [default: a third of the need; more if small]',
)
@click.option("--cpu-mem", type=SIZE, help='Host memory for offloaded bytes, e.g. "4GiB".')
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--width", type=click.IntRange(8), default=256, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--context", type=click.IntRange(8), default=128, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True)
@click.option("--tie-head", is_flag=True, help="Use the embedding's weight in the head.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--check", is_flag=True, help="Train under plain PyTorch too; fail on a difference.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, nothing else.")
def command(as_json: bool, check: bool, **choices: Any) -> None:
    """Train a GPT on the standard library's sources within a small device budget."""
    from autohete.distributed import rank_of_launch, size_of_launch

    if check and size_of_launch() > 1:
        raise click.UsageError("--check compares one process with plain PyTorch, not several ranks")
    if rank_of_launch() == 0:
        return _run(as_json, check, choices)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # the first one tells
        _run(as_json, check, choices)


def _run(as_json: bool, check: bool, choices: dict[str, Any]) -> None:
    from rich.console import Console

    from autohete.demo.training import Demo

    if check and (choices["plain"] or choices["device"] == "cuda"):
        raise click.UsageError("--check compares the host device with plain PyTorch on the CPU")
    console = Console(stderr=as_json)
    demo = Demo(_options(**choices))
    _introduce(console, demo)
    job = demo.prepare()
    with _Progress(console, demo.options, "training") as progress:
        result = demo.run(job, progress.on_step)
    if check:
        with _Progress(console, demo.options, "plain PyTorch") as progress:
            result.differences = demo.check(job, progress.on_step)
    if as_json:
        print_json(_as_dict(result))
    else:
        _conclude(console, result)
    if result.differences is not None and result.differences.largest != 0:
        sys.exit(1)


def _options(
    *,
    device: str,
    plain: bool,
    steps: int,
    gpu_mem: int | None,
    cpu_mem: int | None,
    layers: int,
    width: int,
    heads: int,
    context: int,
    batch: int,
    tie_head: bool,
    seed: int,
) -> DemoOptions:
    from autohete.demo.gpt import GPTConfig
    from autohete.demo.training import DemoOptions

    with of_the_command_line():
        config = GPTConfig(
            num_layers=layers, width=width, num_heads=heads, context=context, tie_head=tie_head
        )
    return DemoOptions(
        model=config,
        steps=steps,
        batch=batch,
        seed=seed,
        device="plain" if plain else device,
        gpu_mem=gpu_mem,
        cpu_mem=cpu_mem,
    )


def _introduce(console: Console, demo: Demo) -> None:
    from autohete.planning.sizes import format_bytes

    need = demo.need
    facts = [
        ("parameters", format_bytes(need.parameters)),
        ("gradients", format_bytes(need.gradients)),
        ("optimizer state", format_bytes(need.optimizer_state)),
        ("activations saved for backward", format_bytes(need.saved_activations)),
        ("all of it", format_bytes(need.total)),
    ]
    if demo.options.device != "plain":
        share = demo.gpu_mem / need.total
        facts.append(("the device is given", f"{format_bytes(demo.gpu_mem)} ({share:.0%})"))
    millions = sum(p.numel() for p in demo.initial.parameters()) / 1e6
    console.print(
        f"GPT of {demo.options.model.num_layers} layers, {millions:.1f} M parameters; text: "
        f"{len(demo.text.training) / 1e6:.1f} MB of Python's standard library"
    )
    print_rows("what plain training needs on the device", facts, err=console.stderr)


class _Progress:
    """A bar with loss and tokens per second; each new plan appears above it.

    Where there is no terminal: a line for every tenth of the way.
    """

    def __init__(self, console: Console, options: DemoOptions, title: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        figures = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), figures, Remaining())
        hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, disable=hidden)
        self._task = self._bar.add_task(title, total=options.steps, loss=float("nan"), rate=0.0)
        self._tokens = options.batch * options.model.context
        self._start = 0.0
        self._plan_shown: Any = None
        self._title, self._steps = title, options.steps

    def __enter__(self) -> _Progress:
        self._bar.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _show_plan(self, model: Any) -> None:
        from autohete.planning import format_plan
        from autohete.report.tables import plan_table

        run: Any = getattr(model, "run", None)
        plan = None if run is None else run.plan
        if plan is not None and plan is not self._plan_shown:
            profile = run.profile
            console = self._bar.console
            if console.is_terminal:
                console.print(plan_table(plan, profile))
            else:
                console.out(format_plan(plan, profile), highlight=False)
            self._plan_shown = plan

    @property
    def on_step(self) -> OnStep:
        def advance(step: int, loss: float, model: Any) -> None:
            self._show_plan(model)
            rate = (step + 1) * self._tokens / (time.perf_counter() - self._start)
            self._bar.update(self._task, advance=1, loss=loss, rate=rate)
            if not self._bar.console.is_terminal and ends_a_tenth(step, self._steps):
                self._bar.console.out(
                    f"{self._title}: step {step + 1} of {self._steps}, loss {loss:.3f}, "
                    f"{rate:,.0f} tokens/s",
                    highlight=False,
                )

        return advance


def _conclude(console: Console, result: DemoResult) -> None:
    from autohete.planning.sizes import format_bytes
    from autohete.report.tables import report_facts

    facts = [("device memory: plain training needs", format_bytes(result.need.total))]
    if result.report is not None:
        facts += report_facts(result.report)
    facts += [
        ("tokens per second", f"{result.tokens / result.seconds:,.0f}"),
        ("held-out loss before (nats per byte)", f"{result.loss_before:.3f}"),
        ("held-out loss after", f"{result.loss_after:.3f}"),
    ]
    print_rows("what happened", facts)
    console.print("a sample of what it writes now:", style="bold")
    console.print(result.sample, markup=False, highlight=False)
    if result.differences is not None:
        different = dataclasses.asdict(result.differences).items()
        title = "largest difference from plain PyTorch with autohete.CPUAdamW"
        print_rows(title, [(name, repr(value)) for name, value in different])


def _as_dict(result: DemoResult) -> dict[str, Any]:
    report = result.report
    return {
        **dataclasses.asdict(dataclasses.replace(result, report=None)),
        "report": None if report is None else {name: getattr(report, name) for name in _FIGURES},
    }
