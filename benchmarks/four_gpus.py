"""Four GPUs in the simulation: how much faster than the best other order of work, by batch.

    python benchmarks/four_gpus.py --models 7b 10b 13b

One rank of four A100-40 on one machine, with the rates fitted to the paper's single-GPU table
(autohete/planning/paper.py), its rows of state and updates, a quarter of the CPU and of the host's
memory, and the collectives as rings. Nothing here is measured; the others are orders of work on
our engine, not those systems.
"""

from __future__ import annotations

import argparse

from autohete.planning import InfeasibleError, make_plan
from autohete.planning.cluster import Cluster, profile_of_rank
from autohete.planning.library import profile_on
from autohete.planning.paper import FITTED, SEQ
from autohete.planning.plan_report import describe_named

OTHERS = ("zero_offload", "patrickstar", "stronghold")


def seconds_of(model: str, batch: int, strategy: str, cluster: Cluster) -> float | None:
    """A step of a global batch; None where it does not fit."""
    machine = FITTED.machine
    description = describe_named(model, batch // cluster.devices, SEQ, "bf16")
    profile = profile_of_rank(profile_on(description, machine), cluster)
    host = machine.host_bytes // cluster.devices_per_machine
    try:
        return make_plan(
            profile, machine.usable_bytes, host, strategy, gated=strategy != "autohete"
        ).step_seconds
    except InfeasibleError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=["7b", "10b", "13b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--device-bandwidth", type=float, default=200e9)
    parser.add_argument("--host-bandwidth", type=float, default=20e9)
    options = parser.parse_args()
    cluster = Cluster(
        4,
        device_bytes_per_second=options.device_bandwidth,
        host_bytes_per_second=options.host_bandwidth,
    )
    print(f"A100-40 as fitted: {FITTED}\n{cluster}\nseconds of a step, and the ratio to the best")
    print(f"{'model':>6}{'batch':>7}{'autohete':>10}" + "".join(f"{o:>14}" for o in OTHERS)
          + f"{'ratio':>8}")  # fmt: skip
    for model in options.models:
        for batch in options.batches:
            ours = seconds_of(model, batch, "autohete", cluster)
            theirs = [seconds_of(model, batch, other, cluster) for other in OTHERS]
            fitting = [t for t in theirs if t is not None]
            ratio = f"{min(fitting) / ours:.2f}" if ours and fitting else "-"
            cells = "".join(f"{t:>14.2f}" if t else f"{'-':>14}" for t in theirs)
            print(f"{model:>6}{batch:>7}{ours or 0:>10.2f}{cells}{ratio:>8}")


if __name__ == "__main__":
    main()
