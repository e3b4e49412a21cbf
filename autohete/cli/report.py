"""`autohete report`: one page with everything that is known of a plan or a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autohete.cli.output import print_json, working
from autohete.cli.types import MACHINE, MODEL, NEW_FILE, PICTURE, SIZE

if TYPE_CHECKING:
    from autohete.report.content import Content

_EPILOG = """\b
Examples:
  autohete report autohete_profile.json            a plan, simulated
  autohete report autohete_run.json                a run: predicted and measured
  autohete report 7b --gpu a100-40 --batch 4       a model and a GPU one need not have
  autohete report autohete_run.json --figure run.svg
The page is one file that needs no network. A run is written by model.report().save(), or by
`autohete trace`.
"""


@click.command(epilog=_EPILOG)
@click.argument("source")
@click.option(
    "-o",
    "--output",
    type=NEW_FILE,
    help="The page.  [default: SOURCE's name with .html, in the current folder]",
)
@click.option("--gpu", type=MACHINE, help="A known machine, e.g. a100-40; for a model.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="For a model.")
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True, help="For a model.")
@click.option("--gpu-mem", type=SIZE, help='Device memory, the limit in the figures, e.g. "24GiB".')
@click.option("--cpu-mem", type=SIZE, help="Host memory likewise.")
@click.option("--figure", type=PICTURE, help="The figures to a .svg, .png or .pdf.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what was written and the facts as JSON."
)
def command(
    source: str, output: str | None, gpu: str | None, batch: int, seq: int, gpu_mem: int | None,
    cpu_mem: int | None, figure: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a page about SOURCE: an autohete_profile.json, an autohete_run.json or a model."""
    with working("drawing"):
        from autohete.report.page import write_page
        from autohete.report.pictures import save_picture

        content = _content(source, gpu, batch, seq, gpu_mem, cpu_mem)
        page = output or f"{Path(source).stem}.html"
        write_page(page, content)
        if figure is not None:
            save_picture(figure, content.figures())
    if as_json:
        facts: dict[str, Any] = dict(content.facts)
        figures = list(content.figures())
        print_json({"page": page, "figure": figure, "figures": figures, "facts": facts})
    else:
        print("\n".join(path for path in (page, figure) if path is not None))


def _content(
    source: str, gpu: str | None, batch: int, seq: int, gpu_mem: int | None, cpu_mem: int | None
) -> Content:
    if gpu is not None:
        model = MODEL.convert(source, None, None)
        return _of_model(model, gpu, batch, seq, gpu_mem, cpu_mem)
    path = Path(source)
    if not path.is_file():
        raise click.UsageError(
            f"{source} is no file; give a profile, a run, or a model with --gpu a100-40"
        )
    return _of_file(path, gpu_mem, cpu_mem)


def _of_model(
    model: str, gpu: str, batch: int, seq: int, device: int | None, host: int | None
) -> Content:
    from autohete.planning import plan_for
    from autohete.planning.named_model import built_once
    from autohete.planning.sweep import sweep_batch, sweep_gpu_mem
    from autohete.report.content import content_of_plan_report

    budgets = {"gpu_mem": device, "cpu_mem": host}
    built = built_once(model)
    content = content_of_plan_report(plan_for(built, gpu, batch, seq, **budgets))
    content.batches = sweep_batch(built, gpu, seq, **budgets)
    content.budgets = sweep_gpu_mem(built, gpu, batch, seq, **budgets)
    return content


def _of_file(path: Path, device: int | None, host: int | None) -> Content:
    from autohete.planning import load_profile, make_plan
    from autohete.report.content import content_of_plan, content_of_run
    from autohete.run_file import is_run, load_run

    if is_run(_parsed(path)):
        return content_of_run(load_run(path), f"autohete: {path.stem}")
    profile, plan = load_profile(path)
    if device is not None:
        plan = make_plan(profile, device, host)
    elif plan is None:
        raise click.UsageError(f"{path} holds no plan; give --gpu-mem to make one")
    return content_of_plan(
        plan, profile, gpu_mem=device, cpu_mem=host, title=f"autohete: {path.stem}"
    )


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None  # load_profile() says what is wrong with it
