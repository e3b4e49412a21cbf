"""`autohete simulate`: what each lane does when, strategies side by side, the paper's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autohete.cli.output import print_json, working
from autohete.cli.scale import cluster_options, print_scale, take_cluster
from autohete.cli.types import NEW_FILE, PICTURE, SIZE, STRATEGY

if TYPE_CHECKING:
    from autohete.planning.cluster import Cluster

_EPILOG = """\b
Examples:
  autohete simulate autohete_profile.json
  autohete simulate autohete_profile.json --gpu-mem 24GiB --strategy zero_offload
  autohete simulate autohete_profile.json --without fifo --trace trace.json
  autohete simulate autohete_profile.json --gpu-mem 24GiB --compare
  autohete simulate autohete_profile.json --figure lanes.svg
  autohete simulate autohete_profile.json --gpu-mem 24GiB --devices 64 --machines 8
  autohete simulate --table paper
The trace opens in Perfetto or chrome://tracing. Without --gpu-mem the plan in the file is used.
"""


@click.command(epilog=_EPILOG)
@click.argument("profile", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--gpu-mem", type=SIZE, help='Plan anew for this much device memory, e.g. "24GiB".')
@click.option(
    "--cpu-mem", type=SIZE, help="Host memory of the new plan, of a machine.  [default: no limit]"
)
@click.option(
    "--strategy", type=STRATEGY, default="autohete", show_default=True, help="Of the new plan."
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(["fifo", "barrier", "aggregation"]),
    help="Give up priorities (fifo), the overlap with the next forward (barrier) or large copies "
    "(aggregation).",
)
@click.option(
    "--compare", is_flag=True, help="Print every strategy and ablation side by side; --gpu-mem."
)
@cluster_options
@click.option(
    "--table", type=click.Choice(["paper"]), help="Print the paper's tables beside simulated ones."
)
@click.option("--trace", type=NEW_FILE, help="Write the lanes' work here.")
@click.option("--figure", type=PICTURE, help="Draw to this .svg, .png or .pdf file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    profile: str | None,
    gpu_mem: int | None,
    cpu_mem: int | None,
    strategy: str,
    without: tuple[str, ...],
    compare: bool,
    table: str | None,
    trace: str | None,
    figure: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Simulate the steps of a plan, from an autohete_profile.json."""
    if table is not None:
        _print_paper_table(as_json)
        return
    if profile is None:
        raise click.UsageError("give an autohete_profile.json, or --table paper")
    cluster = take_cluster(choices)
    if cluster is not None:
        if gpu_mem is None:
            raise click.UsageError("--devices plans anew; give --gpu-mem, of each device")
        _print_scale(profile, cluster, gpu_mem, cpu_mem, strategy, as_json)
        return
    if compare:
        if gpu_mem is None:
            raise click.UsageError("--compare plans anew; give --gpu-mem")
        _print_comparison(profile, gpu_mem, cpu_mem, as_json)
        return
    from autohete.planning import load_profile, make_plan, simulate, write_trace

    measured, plan = load_profile(profile)
    if gpu_mem is not None:
        plan = make_plan(measured, gpu_mem, cpu_mem, strategy)
    elif plan is None:
        raise click.UsageError(f"{profile} holds no plan; give --gpu-mem to make one")
    simulation = simulate(measured, plan, without=without)
    if trace is not None:
        write_trace(trace, measured, simulation)
    if figure is not None:
        from autohete.report.content import content_of_plan
        from autohete.report.pictures import save_picture

        save_picture(figure, content_of_plan(plan, measured).figures())
    figures = {
        "strategy": plan.strategy,
        "without": list(without),
        "step_seconds": simulation.step_seconds,
        "first_step_seconds": simulation.first_step_seconds,
        "compute_seconds": simulation.compute_seconds,
    }
    if as_json:
        print_json(figures)
        return
    busy = simulation.compute_seconds / simulation.step_seconds
    print(plan)
    print(f"simulated: {simulation.step_seconds:.4f} s a step, device busy {busy:.0%} of it")


def _print_paper_table(as_json: bool) -> None:
    from autohete.planning.paper_table import format_paper_comparison, paper_comparison

    with working("simulating"):
        figures = paper_comparison()
    if as_json:
        print_json(figures)
    else:
        print(format_paper_comparison(figures))


def _print_scale(
    profile: str,
    cluster: Cluster,
    gpu_mem: int,
    cpu_mem: int | None,
    strategy: str,
    as_json: bool,
) -> None:
    from autohete.planning import load_profile
    from autohete.planning.cluster import scale

    measured, _ = load_profile(profile)
    with working("planning for each number of devices"):
        points = scale(measured, cluster, gpu_mem, cpu_mem, strategy=strategy)
    print_scale(points, cluster, as_json)


def _print_comparison(profile: str, gpu_mem: int, cpu_mem: int | None, as_json: bool) -> None:
    from autohete.planning import compare_strategies, format_comparison, load_profile
    from autohete.planning.compare import compare_ablations, results_to_dict

    measured, _ = load_profile(profile)
    with working("planning with each strategy"):
        results = compare_strategies(measured, gpu_mem, cpu_mem)
        results += compare_ablations(measured, gpu_mem, cpu_mem)
    if as_json:
        print_json(results_to_dict(results))
    else:
        print(format_comparison(results))
