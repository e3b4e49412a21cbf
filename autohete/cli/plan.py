"""`autohete plan`: would this model train on that GPU, what leaves it, how fast would it be?"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autohete.cli.output import print_json, working
from autohete.cli.quick import without_compiler
from autohete.cli.scale import cluster_options, print_scale, take_cluster
from autohete.cli.types import MACHINE, MODEL, PICTURE, SIZE, STRATEGY

if TYPE_CHECKING:
    from autohete.planning.plan_report import PlanReport

_EPILOG = """\b
Examples:
  autohete plan 7b --gpu a100-40 --batch 4 --seq 1024
  autohete plan gpt2-xl --gpu a100-40 --gpu-mem 12GiB --json
  autohete plan 7b --gpu a100-40 --batch 4 --figure plan.svg
  autohete plan 7b --gpu a100-40 --sweep batch --figure curve.png
  autohete plan 7b --gpu a100-40 --batch 4 --sweep gpu_mem --json
  autohete plan 7b --gpu a100-40 --devices 64 --machines 8 --inter-bandwidth 25GB
  autohete plan ./config.json --gpu h100 --batch 8 --seq 2048 --strategy zero_offload
Neither a GPU nor weights are needed. Exit code 1 when no plan fits; the smallest sizes that would
are named.
"""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL)
@click.option(
    "--model", "named", metavar="MODEL", type=MODEL, help="The model, if not given as argument."
)
@click.option("--gpu", required=True, type=MACHINE, help="A known machine, e.g. a100-40.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16", "autocast"]),
    default="bf16",
    show_default=True,
)
@click.option(
    "--gpu-mem", type=SIZE, help='Device memory to use, e.g. "24GiB".  [default: the GPU\'s]'
)
@click.option(
    "--cpu-mem", type=SIZE, help='Host memory to use, e.g. "128GiB".  [default: the machine\'s]'
)
@click.option("--strategy", type=STRATEGY, default="autohete", show_default=True)
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
@cluster_options
@click.option("--figure", type=PICTURE, help="Draw to this .svg, .png or .pdf file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan and its figures as JSON.")
def command(
    model: str | None,
    named: str | None,
    gpu: str,
    sweep: str | None,
    figure: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Plan MODEL (a preset such as 7b, or a config.json) for a machine you need not have."""
    if (model is None) == (named is None):
        raise click.UsageError("give one model, e.g. autohete plan 7b --gpu a100-40")
    model = model or named or ""
    choices = {name: value for name, value in choices.items() if value is not None}
    cluster = take_cluster(choices)
    if cluster is not None:
        if sweep is not None or figure is not None:
            raise click.UsageError("--devices prints a table; leave out --sweep and --figure")
        with working("planning for each number of devices"), _quick(model, choices):
            from autohete.planning.plan_report import scale_for

            points = scale_for(
                model, gpu, choices.pop("batch"), choices.pop("seq"), cluster, **choices
            )
        print_scale(points, cluster, as_json)
        return
    if sweep is not None:
        _sweep(model, gpu, sweep, figure, as_json, choices)
        return
    with working("planning"), _quick(model, choices):
        from autohete.planning import plan_for

        report = plan_for(model, gpu, choices.pop("batch"), choices.pop("seq"), **choices)
        if figure is not None:
            _draw(figure, report)
    print(report.to_json() if as_json else report)


def _quick(model: str, choices: dict[str, Any]) -> AbstractContextManager[None]:
    """A preset needs no compiler; a config.json is run by transformers, which imports it."""
    if Path(model).is_file() or choices.get("precision") == "autocast":
        return nullcontext()
    return without_compiler()


def _draw(path: str, report: PlanReport) -> None:
    from autohete.report.content import content_of_plan_report
    from autohete.report.pictures import save_picture

    save_picture(path, content_of_plan_report(report).figures())


def _sweep(
    model: str, gpu: str, over: str, figure: str | None, as_json: bool, choices: dict[str, Any]
) -> None:
    with working("planning"), _quick(model, choices):
        from autohete.planning.sweep import format_sweep, sweep_batch, sweep_gpu_mem

        batch, seq = choices.pop("batch"), choices.pop("seq")
        if over == "batch":
            points = sweep_batch(model, gpu, seq, **choices)
        else:
            points = sweep_gpu_mem(model, gpu, batch, seq, **choices)
        if figure is not None:
            from autohete.report.content import content_of_sweep
            from autohete.report.pictures import save_picture

            save_picture(figure, content_of_sweep(over, points).figures())
    if as_json:
        print_json([point.to_dict() for point in points])
    else:
        print(format_sweep(over, points))
