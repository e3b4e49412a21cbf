"""`autohete trace`: what each lane did when, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autohete.cli.output import print_json
from autohete.cli.progress import Steps
from autohete.cli.types import NEW_FILE, SIZE

_EPILOG = """\b
Examples:
  autohete trace                                    train a small GPT, trace its last steps
  autohete trace autohete_run.json -o trace.json    the trace of a run of your own
  autohete trace --steps 12 --run autohete_run.json
  autohete report autohete_run.json                 the same as a page
Open the file at https://ui.perfetto.dev or chrome://tracing. In a loop of your own: model.trace(),
some steps, then model.report().save("autohete_run.json") or model.trace("trace.json").
"""


@click.command(epilog=_EPILOG)
@click.argument("run", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", type=NEW_FILE, default="trace.json", show_default=True)
@click.option("--steps", type=click.IntRange(5), default=8, show_default=True, help="Without RUN.")
@click.option(
    "--gpu-mem",
    type=SIZE,
    help="Without RUN: device memory.  [default: a third of the need; more if small]",
)
@click.option("--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True)
@click.option("--run", "save_to", type=NEW_FILE, help="Keep the run here too.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: str | None, output: str, steps: int, gpu_mem: int | None, device: str,
    save_to: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the trace of RUN, or of a small GPT that is trained for some steps."""
    if run is not None and save_to is not None:
        raise click.UsageError("--run keeps a run that was trained here; RUN is kept already")
    from autohete.planning.profile_file import write_atomically
    from autohete.run_file import load_run, save_run
    from autohete.run_report import chrome_trace

    if run is not None:
        report = load_run(run)
    else:
        from autohete.demo.traced import traced_run

        with Steps("training", steps) as shown:
            report = traced_run(
                steps=steps, gpu_mem=gpu_mem, device=device, on_step=lambda step: shown.done()
            )
        if save_to is not None:
            save_run(save_to, report)
    details = report.details
    if details is None or not details.spans:
        raise ValueError(
            f"{run} holds no trace, expected one that was saved while a trace was on; call "
            "model.trace() before the steps and save the report after them"
        )
    trace = chrome_trace(details.spans, details.unit_names)
    write_atomically(Path(output), json.dumps(trace))
    if as_json:
        print_json({"trace": output, "run": save_to, "spans": len(details.spans)})
    else:
        print(f"{output}: {len(details.spans)} spans; open it at https://ui.perfetto.dev")
