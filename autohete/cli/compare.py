"""`autohete compare`: gradients and moments of a run against plain fp32, layer by layer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from autohete.cli.output import print_json, print_rows
from autohete.cli.progress import Steps
from autohete.cli.types import SIZE, of_the_command_line

if TYPE_CHECKING:
    from autohete.demo.against_plain import Difference

_EPILOG = """\b
Examples:
  autohete compare                              in fp32: every difference is 0
  autohete compare --precision bf16             what half precision costs, layer by layer
  autohete compare --precision bf16 --most 0.05 exit code 1 where a gradient is further off
A small GPT is trained twice with the same data and random numbers: under autohete within --gpu-mem,
and as plain fp32 PyTorch. Relative: the norm of the difference over the plain norm.
"""


@click.command(epilog=_EPILOG)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option(
    "--gpu-mem",
    type=SIZE,
    help='Device memory, e.g. "64MiB".  [default: a third of the need; more if small]',
)
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--width", type=click.IntRange(8), default=128, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--most", type=click.FloatRange(0), help="Fail where a gradient's relative difference is more."
)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def command(
    steps: int, precision: str, device: str, gpu_mem: int | None, layers: int, width: int,
    seed: int, most: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Train a small GPT under autohete and in plain fp32, and compare them layer by layer."""
    with Steps("preparing", 2 * steps) as shown:
        from autohete.demo.against_plain import compare_with_plain
        from autohete.demo.gpt import GPTConfig
        from autohete.demo.training import DemoOptions

        with of_the_command_line():
            model = GPTConfig(num_layers=layers, width=width, context=64)
        options = DemoOptions(
            model=model,
            steps=steps,
            batch=4,
            seed=seed,
            device=device,
            gpu_mem=gpu_mem,
        )
        found = compare_with_plain(options, precision, lambda which, step: shown.done(which))
    if as_json:
        print_json([difference.to_dict() for difference in found])
    else:
        _print(found, steps, precision)
    worst = max((d.relative for d in found if d.kind == "gradient"), default=0.0)
    if most is not None and worst > most:
        print(
            f"autohete: compare: the largest relative difference of a gradient is {worst:.3g}, "
            f"expected at most {most:g}",
            file=sys.stderr,
        )
        sys.exit(1)


def _print(found: list[Difference], steps: int, precision: str) -> None:
    rows = [
        (
            d.unit,
            d.kind,
            f"{d.norm:.4g}",
            f"{d.plain_norm:.4g}",
            f"{d.relative:.2e}" if d.relative else "0",
            f"{d.cosine:.6f}",
            f"{d.largest:.2e}" if d.largest else "0",
        )
        for d in found
    ]
    header = ("unit", "of", "norm", "plain norm", "relative", "cosine", "largest")
    print_rows(f"autohete in {precision} against plain fp32 after {steps} steps", rows, header)
