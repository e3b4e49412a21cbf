"""`autohete profile`: what a machine can do, or what a model needs, into a file to plan from."""

from __future__ import annotations

import click

from autohete.cli.output import print_json, working
from autohete.cli.types import MACHINE, MODEL, NEW_FILE

_EPILOG = """\b
Examples:
  autohete profile --hardware
  autohete profile --hardware --refresh --json
  autohete profile gpt2-xl --gpu a100-40 --batch 4 --seq 1024 --output autohete_profile.json
The first form measures this machine and keeps the result; the second measures again; the third
needs no GPU and writes what `autohete simulate` reads.
"""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL)
@click.option("--hardware", is_flag=True, help="Measure this machine: memory, links, CPU AdamW.")
@click.option("--refresh", is_flag=True, help="Measure again even if a result is kept.")
@click.option(
    "--gpu", type=MACHINE, default="a100-40", show_default=True, help="A known machine, with MODEL."
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--output",
    type=NEW_FILE,
    default="autohete_profile.json",
    show_default=True,
    help="Where the model's profile goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    model: str | None,
    hardware: bool,
    refresh: bool,
    gpu: str,
    batch: int,
    seq: int,
    output: str,
    as_json: bool,
) -> None:
    """Measure this machine (--hardware), or describe MODEL on a known one."""
    if hardware == (model is not None):
        raise click.UsageError("give --hardware or a model")
    if model is not None:
        _write_profile(model, gpu, batch, seq, output, as_json)
        return
    from autohete.planning.machine import measure_machine, report_to_dict

    report = measure_machine(
        refresh=refresh, progress=lambda text: click.echo(f"measuring: {text}", err=True)
    )
    if as_json:
        print_json(report_to_dict(report))
    else:
        click.echo(str(report))


def _write_profile(model: str, gpu: str, batch: int, seq: int, output: str, as_json: bool) -> None:
    with working("describing the model"):
        from autohete.planning import plan_for, save_profile

        report = plan_for(model, gpu, batch, seq, suggest=False)
    save_profile(output, report.profile, report.plan)
    if as_json:
        print_json({"profile": output, **report.to_dict()})
        return
    click.echo(f"{output}: {len(report.profile.units)} units of {model}, and a plan for {gpu}")
