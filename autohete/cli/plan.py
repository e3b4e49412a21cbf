"""`autohete plan`: would this model train on that GPU, what leaves it, how fast would it be?"""

from __future__ import annotations

import json
from typing import Any

import click

_EPILOG = """\b
Examples:
  autohete plan 7b --gpu a100-40 --batch 4 --seq 1024
  autohete plan gpt2-xl --gpu a100-40 --gpu-mem 12GiB --json
  autohete plan 7b --gpu a100-40 --sweep batch --plot curve.png
  autohete plan 7b --gpu a100-40 --batch 4 --sweep gpu_mem --json
  autohete plan ./config.json --gpu h100 --batch 8 --seq 2048 --strategy zero_offload
Neither a GPU nor weights are needed. Exit code 1 when no plan fits; the smallest sizes that would
are named.
"""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--model", "named", metavar="MODEL", help="The model, if not given as argument.")
@click.option("--gpu", required=True, help="A known machine, e.g. a100-40.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16", "autocast"]),
    default="bf16",
    show_default=True,
)
@click.option("--gpu-mem", help='Device memory to use, e.g. "24GiB".  [default: the GPU\'s]')
@click.option("--cpu-mem", help='Host memory to use, e.g. "128GiB".  [default: the machine\'s]')
@click.option("--strategy", default="autohete", show_default=True)
@click.option("--pcie", type=click.IntRange(3, 5), help="The link's generation, if another.")
@click.option(
    "--cpu-adam",
    "cpu_params_per_second",
    type=click.FloatRange(0, min_open=True),
    help="CPU AdamW in parameters per second, e.g. 2.5e9.  [default: the machine's]",
)
@click.option(
    "--sweep", type=click.Choice(["batch", "gpu_mem"]), help="Plan over a range, one line each."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the sweep to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan and its figures as JSON.")
def command(
    model: str | None,
    named: str | None,
    gpu: str,
    sweep: str | None,
    plot: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Plan MODEL (a preset such as 7b, or a config.json) for a machine you need not have."""
    if (model is None) == (named is None):
        raise click.UsageError("give one model, e.g. autohete plan 7b --gpu a100-40")
    model = model or named or ""
    choices = {name: value for name, value in choices.items() if value is not None}
    if sweep is not None:
        _sweep(model, gpu, sweep, plot, as_json, choices)
        return
    if plot is not None:
        raise click.UsageError("--plot draws a sweep; give --sweep batch or --sweep gpu_mem")
    from autohete.planning import plan_for

    report = plan_for(model, gpu, choices.pop("batch"), choices.pop("seq"), **choices)
    print(report.to_json() if as_json else report)


def _sweep(
    model: str, gpu: str, over: str, plot: str | None, as_json: bool, choices: dict[str, Any]
) -> None:
    from autohete.planning.sweep import draw_sweep, format_sweep, sweep_batch, sweep_gpu_mem

    batch, seq = choices.pop("batch"), choices.pop("seq")
    if over == "batch":
        points = sweep_batch(model, gpu, seq, **choices)
    else:
        points = sweep_gpu_mem(model, gpu, batch, seq, **choices)
    if plot is not None:
        draw_sweep(plot, over, points)
    if as_json:
        print(json.dumps([point.to_dict() for point in points], indent=1))
    else:
        print(format_sweep(over, points))
