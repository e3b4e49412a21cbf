"""What `plan` and `simulate` share: options that say which devices and machines there would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autohete.cli.output import print_json
from autohete.cli.types import SIZE, of_the_command_line

if TYPE_CHECKING:
    from autohete.planning.cluster import Cluster, ScalePoint

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--devices",
        type=click.IntRange(1, 1 << 20),
        help="Simulate data parallel training on 1, 2, 4, ... up to so many devices.",
    ),
    click.option(
        "--machines", type=click.IntRange(1, 1 << 20), help="That have the devices.  [default: 1]"
    ),
    click.option(
        "--inter-bandwidth",
        type=SIZE,
        metavar="SIZE",
        help='Of a machine\'s network link a second, one way.  [default: "12.5GB"]',
    ),
    click.option(
        "--device-bandwidth",
        type=SIZE,
        metavar="SIZE",
        help='Between the devices of a machine a second, one way.  [default: "20GB"]',
    ),
    click.option(
        "--host-bandwidth",
        type=SIZE,
        metavar="SIZE",
        help='Between the processes of a machine a second, one way.  [default: "3GB"]',
    ),
    click.option(
        "--devices-per-link",
        type=click.IntRange(1),
        help="Devices behind one link to the host, which share it.  [default: 1]",
    ),
)
_RATES = {
    "inter_bandwidth": "machine_bytes_per_second",
    "device_bandwidth": "device_bytes_per_second",
    "host_bandwidth": "host_bytes_per_second",
}


def cluster_options(command: F) -> F:
    """Add the options; see take_cluster()."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_cluster(choices: dict[str, Any]) -> Cluster | None:
    """Take the options out of `choices`; None where one device is meant.

    Raises:
        click.UsageError: one of them is given without --devices.
    """
    names = ("devices", "machines", "devices_per_link", *_RATES)
    given = {n: v for n in names if (v := choices.pop(n, None)) is not None}
    if not given:
        return None
    if "devices" not in given:
        option = next(iter(given)).replace("_", "-")
        raise click.UsageError(f"--{option} is about several devices; give --devices")
    from autohete.planning.cluster import Cluster

    for name, field in _RATES.items():
        if name in given:
            given[field] = float(given.pop(name))
    with of_the_command_line():
        return Cluster(**given)


def print_scale(points: list[ScalePoint], cluster: Cluster, as_json: bool) -> None:
    """Print the table, after the plan of the most devices."""
    from autohete.planning.cluster import cluster_to_dict, format_scale

    if as_json:
        assumed = cluster_to_dict(cluster)
        print_json({"assumed": assumed, "devices": [point.to_dict() for point in points]})
        return
    last = points[-1].plan
    if last is not None:
        print(f"The plan of each of {points[-1].devices} devices:\n{last}\n")
    print(format_scale(points, cluster))
