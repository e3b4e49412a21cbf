"""Many devices on many machines that are not here: what a rank of them sees, and how it scales.

All ranks are alike, so one is planned and simulated. Collectives are taken as rings over all ranks,
machine by machine: each sends and receives (N - 1) / N of the bytes to bring rows together, twice
that to average, over the slower of the two links; one of a machine's ranks is at its network link
at a time. Latencies: each ring step among a machine's devices; between machines a tree for what the
devices average (as NCCL does) and a ring for what the hosts bring together (as gloo does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autohete import _C
from autohete.planning.make_plan import Size, make_plan
from autohete.planning.sizes import format_bytes, parse_bytes

_EXCHANGE_BUFFERS = 3  # of the largest unit's gradients, on the device (docs/adr/0013-ranks.md)


@dataclass(frozen=True)
class Cluster:
    """Alike devices on alike machines. Rates are per second and in one direction."""

    devices: int
    machines: int = 1
    device_bytes_per_second: float = 20e9
    """Between two devices of a machine: PCIe 4 as NCCL reaches it; give more for NVLink."""
    machine_bytes_per_second: float = 12.5e9
    """Of a machine's network link, which its ranks share: 100 Gbit/s."""
    host_bytes_per_second: float = 3e9
    """Between two processes of one machine, through gloo: an assumption, measure your own."""
    device_latency_seconds: float = 10e-6
    machine_latency_seconds: float = 30e-6
    devices_per_link: int = 1
    """Devices behind one link to the host, which share it."""

    def __post_init__(self) -> None:
        for name in ("devices", "machines", "devices_per_link"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected at least 1")
        if self.devices < self.machines or self.devices % self.machines:
            raise ValueError(
                f"devices is {self.devices} on {self.machines} machines, expected the same number "
                "on each; give a multiple of the machines"
            )

    @property
    def devices_per_machine(self) -> int:
        return self.devices // self.machines

    def of(self, devices: int) -> Cluster:
        """Return as many of these devices, on as few of these machines as have them."""
        machines = -(-devices // self.devices_per_machine)
        return replace(self, devices=machines * -(-devices // machines), machines=machines)

    def ranks(self) -> _C.RankProfile:
        """Return the collectives of its ranks as the planner takes them."""
        ranks = _C.RankProfile()
        ranks.num_ranks = self.devices
        if self.devices == 1:
            return ranks
        share = (self.devices - 1) / self.devices
        among_devices = self._slowest(self.device_bytes_per_second)
        among_hosts = self._slowest(self.host_bytes_per_second)
        ranks.exchange_bytes_per_second = among_devices / (2 * share)
        ranks.device_gather_bytes_per_second = among_devices / share
        ranks.gather_bytes_per_second = among_hosts / share
        inside = (self.devices_per_machine - 1) * self.device_latency_seconds
        tree = math.ceil(math.log2(self.machines)) * self.machine_latency_seconds
        ranks.exchange_latency_seconds = 2 * (inside + tree)
        ranks.device_gather_latency_seconds = inside + tree
        between = self.machine_latency_seconds if self.machines > 1 else self.device_latency_seconds
        ranks.gather_latency_seconds = (self.devices - 1) * between
        # Packing reads and writes device memory, far faster than any link; the shares stay 1 but
        # where exchange and gather meet on the network link.
        ranks.pack_bytes_per_second = 200e9
        ranks.collective_share_during_other = 0.5 if self.machines > 1 else 1.0
        return ranks

    def _slowest(self, inside: float) -> float:
        rates = [inside] if self.devices_per_machine > 1 else []
        return min([*rates, *([self.machine_bytes_per_second] if self.machines > 1 else [])])


def profile_of_rank(alone: _C.Profile, cluster: Cluster) -> _C.Profile:
    """Return what one rank of a cluster sees, from the profile of a process that trains alone.

    Its batch is that of the profile. It has its rows of the state and its share of the machine's
    CPU and links.
    """
    profile = _C.Profile(alone)
    if alone.ranks.num_ranks > 1:
        raise ValueError(
            f"profile: it was measured by {alone.ranks.num_ranks} ranks, expected by one process "
            "that trains alone; make one with process_group=False"
        )
    if cluster.devices == 1:
        return profile
    units = [_C.UnitProfile(unit) for unit in alone.units]
    for unit in units:
        unit.state_bytes = -(-unit.state_bytes // cluster.devices)
    profile.units = units
    largest = max(unit.grad_bytes for unit in units)
    profile.fixed_device_bytes += _EXCHANGE_BUFFERS * largest
    hardware = _C.HardwareProfile(alone.hardware)
    hardware.cpu_params_per_second /= cluster.devices_per_machine
    sharing = min(cluster.devices_per_link, cluster.devices_per_machine)
    hardware.h2d_bytes_per_second /= sharing
    hardware.d2h_bytes_per_second /= sharing
    profile.hardware = hardware
    profile.ranks = cluster.ranks()
    _C.validate_profile(profile)
    return profile


@dataclass(frozen=True)
class ScalePoint:
    """One number of devices: the plan of each rank, and what all do together."""

    devices: int
    machines: int
    plan: _C.Plan | None
    """None: nothing fits; `error` says what must grow."""
    error: str = ""
    speed_up: float = 0.0
    """Batches a second of all devices over those of the fewest that fit, times their number."""
    efficiency: float = 0.0
    """The speed-up for each device."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        fields = ("devices", "machines", "error", "speed_up", "efficiency")
        figures = {name: getattr(self, name) for name in fields}
        if self.plan is not None:
            figures |= {
                "step_seconds": self.plan.step_seconds,
                "binding_lane": self.plan.binding_lane,
                "host_bytes_of_machine": self.plan.host_bytes * (self.devices // self.machines),
                **placed(self.plan),
            }
        return figures


def placed(plan: _C.Plan) -> dict[str, int]:
    """Count what a plan keeps elsewhere or makes again."""
    return {
        "state_on_host": sum(u.optimizer_state == _C.Tier.HOST for u in plan.units),
        "parameters_on_host": sum(u.parameters == _C.Tier.HOST for u in plan.units),
        "recomputed": sum(u.activations == _C.ActivationRule.RECOMPUTE for u in plan.units),
    }


def numbers_up_to(devices: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    return sorted({1 << power for power in range(devices.bit_length())} | {devices})


def scale(
    alone: _C.Profile,
    cluster: Cluster,
    gpu_mem: Size,
    host_mem: Size | None = None,
    *,
    numbers: Sequence[int] | None = None,
    strategy: str = "autohete",
    gated: bool = True,
) -> list[ScalePoint]:
    """Plan and simulate a rank of 1, 2, 4, ... of the cluster's devices, each with its own batch.

    Args:
        alone: profile of a process that trains alone.
        gpu_mem: device memory of each rank.
        host_mem: host memory of each machine, which its ranks share; None for no limit.
        numbers: of devices; None for powers of two up to the cluster's, and that.
        strategy, gated: see make_plan().
    """
    whole_host = None if host_mem is None else parse_bytes(host_mem, "cpu_mem")
    points: list[ScalePoint] = []
    first: ScalePoint | None = None
    for number in numbers_up_to(cluster.devices) if numbers is None else numbers:
        some = cluster.of(number)
        host = None if whole_host is None else whole_host // some.devices_per_machine
        try:
            profile = profile_of_rank(alone, some)
            plan = make_plan(profile, gpu_mem, host, strategy, gated=gated)
        except _C.InfeasibleError as error:
            points.append(ScalePoint(some.devices, some.machines, None, str(error)))
            continue
        point = ScalePoint(some.devices, some.machines, plan)
        first = first or point
        assert first.plan is not None
        per_device = first.plan.step_seconds / plan.step_seconds
        speed_up = per_device * some.devices
        points.append(replace(point, speed_up=speed_up, efficiency=speed_up / some.devices))
    return points


def format_scale(points: Sequence[ScalePoint], cluster: Cluster) -> str:
    """Return one line per number of devices, and the assumptions."""
    lines = [
        f"{'devices':>8}{'machines':>10}{'step':>11}{'speed-up':>10}{'efficiency':>12}"
        f"{'recomputed':>12}{'state off':>11}{'params off':>12}{'host':>12}  bound by"
    ]
    for point in points:
        if point.plan is None:
            lines.append(f"{point.devices:>8}{point.machines:>10}  does not fit: {point.error}")
            continue
        f = point.to_dict()
        lines.append(
            f"{point.devices:>8}{point.machines:>10}{f['step_seconds']:>9.3f} s"
            f"{point.speed_up:>10.2f}{point.efficiency:>12.1%}{f['recomputed']:>12}"
            f"{f['state_on_host']:>11}{f['parameters_on_host']:>12}"
            f"{format_bytes(f['host_bytes_of_machine']):>12}  {f['binding_lane']}"
        )
    link = cluster.machine_bytes_per_second
    lines.append(
        "simulated, each device with its own batch; host: of a machine. Assumed: rings at "
        f"{cluster.device_bytes_per_second / 1e9:g} GB/s between a machine's devices, "
        f"{cluster.host_bytes_per_second / 1e9:g} GB/s between its processes"
        + (f", {link / 1e9:g} GB/s of each machine's network link" if cluster.machines > 1 else "")
    )
    return "\n".join(lines)


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the assumptions as plain JSON values."""
    return asdict(cluster)
