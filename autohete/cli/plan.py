"""`autohete plan`: would this model train on that GPU, what leaves it, how fast would it be?"""

from __future__ import annotations

from typing import Any

import click

_EPILOG = """\b
Examples:
  autohete plan 7b --gpu a100-40 --batch 4 --seq 1024
  autohete plan gpt2-xl --gpu a100-40 --gpu-mem 12GiB --json
  autohete plan ./config.json --gpu h100 --batch 8 --seq 2048 --strategy zero_offload
Neither a GPU nor weights are needed. Exit code 1 when no plan fits; the smallest sizes that would
are named.
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@click.option("--gpu", required=True, help="A known machine, e.g. a100-40.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="bf16", show_default=True
)
@click.option("--gpu-mem", help='Device memory to use, e.g. "24GiB".  [default: the GPU\'s]')
@click.option("--cpu-mem", help='Host memory to use, e.g. "128GiB".  [default: the machine\'s]')
@click.option("--strategy", default="autohete", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the plan and its figures as JSON.")
def command(model: str, as_json: bool, **choices: Any) -> None:
    """Plan MODEL (a preset such as 7b, or a config.json) for a machine you need not have."""
    from autohete.planning import plan_for

    report = plan_for(
        model, choices.pop("gpu"), choices.pop("batch"), choices.pop("seq"), **choices
    )
    print(report.to_json() if as_json else report)
