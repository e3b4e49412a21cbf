"""Four GPUs in the simulation, under several sets of assumptions.

    python benchmarks/four_gpus.py

One rank of four A100-40 on one machine, with the rates fitted to the paper's single-GPU table
(autohete/planning/paper.py), its rows of state and updates, a quarter of the CPU and of the host's
memory. For each set: the paper's three ratios at 10B (AutoHete over PatrickStar, their rms error),
how the rate of AutoHete grows from a batch of 4 to 64 (paper: 7.62 times), how much faster it is
than the best other order of work at a global batch of 8. Then some sets batch by batch.
Nothing here is measured; the others are orders of work on our engine, not those systems.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from autohete.planning import Budgets, Profile, paper
from autohete.planning.cluster import Cluster, profile_of_rank
from autohete.planning.library import profile_on

OTHERS = ("zero_offload", "patrickstar", "stronghold")
RANKS = paper.CLUSTER.devices


@dataclass(frozen=True)
class Assumptions:
    """One way to take the paper's four GPUs."""

    name: str
    cluster: Cluster = paper.CLUSTER
    early_gathers: bool = False
    """Updated rows are brought together as they are ready, not from step() on."""
    partitioned: bool = False
    """Gradients are averaged and leave by rows (ZeRO-2), not whole on every rank."""
    link_shares: tuple[float, float] | None = None
    """No lanes for collectives: what each rank's link up and down reaches instead, of its rate."""
    recompute: tuple[bool, ...] = (True,)
    split: bool = False
    """Each system may split its rows into equal micro-batches, and takes the fastest split."""

    def seconds(self, model: str, batch: int, system: str) -> float:
        """A step of a global batch; inf where it does not fit."""
        machine = paper.FITTED.machine
        budgets = Budgets(machine.usable_bytes, machine.host_bytes // RANKS)
        rows = batch // RANKS
        splits = [m for m in range(1, rows + 1) if rows % m == 0] if self.split else [1]
        profiles = (self._profile(model, rows // m, m) for m in splits)
        return min(
            paper.step_seconds(profile, system, budgets, recompute=self.recompute)
            for profile in profiles
        )

    def _profile(self, model: str, rows: int, micro_batches: int) -> Profile:
        description = paper.description(model, rows)
        alone = profile_on(description, paper.FITTED.machine, micro_batches)
        if self.link_shares is not None:
            return _without_collectives(alone, self.link_shares)
        profile = profile_of_rank(alone, self.cluster)
        ranks = profile.ranks
        ranks.own_gradients, ranks.early_gathers = self.partitioned, self.early_gathers
        profile.ranks = ranks
        return profile


def _without_collectives(profile: Profile, shares: tuple[float, float]) -> Profile:
    """A rank's rows of state and updates (of all ranks' CPU), on links of another rate."""
    units, hardware = profile.units, profile.hardware
    for unit in units:
        unit.state_bytes //= RANKS
    hardware.device_params_per_second *= RANKS
    hardware.h2d_bytes_per_second *= shares[0]
    hardware.d2h_bytes_per_second *= shares[1]
    if shares[0] < 1:  # both directions at once is in the shares
        hardware.h2d_share_during_d2h = hardware.d2h_share_during_h2d = 1
    profile.units, profile.hardware = units, hardware
    return profile


_LIBRARY = paper.FITTED.machine
SETS = (
    Assumptions("as `autohete plan --devices 4`"),
    Assumptions("as 1, gradients partitioned", partitioned=True),
    Assumptions("as 1, processes exchange 20 GB/s", Cluster(4, host_bytes_per_second=20e9)),
    Assumptions(
        "as 3, gradients partitioned", Cluster(4, host_bytes_per_second=20e9), partitioned=True
    ),
    Assumptions(
        "as 3, NVLink of 200 GB/s",
        Cluster(4, device_bytes_per_second=200e9, host_bytes_per_second=20e9),
    ),
    # Whole layers pass over every rank's PCIe link, from the host or another rank.
    Assumptions("PCIe alone, one direction at a time", link_shares=(1, 1)),
    Assumptions(
        "PCIe alone, always both directions",
        link_shares=(_LIBRARY.h2d_share_during_d2h, _LIBRARY.d2h_share_during_h2d),
    ),
    Assumptions("a quarter over each link, the rest hidden", link_shares=(RANKS, RANKS)),
    Assumptions("as 8, micro-batches", link_shares=(RANKS, RANKS), split=True),
    Assumptions("as 1, micro-batches", split=True),
    Assumptions("as 1, others recompute all or none", recompute=(False, True)),
    Assumptions(
        "as 8, others recompute all or none (the table until November 2026)",
        link_shares=(RANKS, RANKS),
        recompute=(False, True),
    ),
    Assumptions("as 1, rows brought together as they are updated", early_gathers=True),
    Assumptions(
        "as 3, rows brought together as they are updated",
        Cluster(4, host_bytes_per_second=20e9),
        early_gathers=True,
    ),
    Assumptions(
        "as 14, gradients partitioned",
        Cluster(4, host_bytes_per_second=20e9),
        early_gathers=True,
        partitioned=True,
    ),
)


def lead(taken: Assumptions, model: str, batch: int) -> tuple[float, dict[str, float]]:
    """Seconds of AutoHete, and of the others."""
    return (
        taken.seconds(model, batch, "autohete"),
        {other: taken.seconds(model, batch, other) for other in OTHERS},
    )


def print_set(taken: Assumptions, models: list[str]) -> None:
    cells, rates = [], []
    for batch, (before, after) in paper.FOUR_GPUS.items():
        ours, other = (taken.seconds("10b", batch, s) for s in ("autohete", "patrickstar"))
        cells.append(paper.Cell(str(batch), "ratio", after / before, other / ours, fitted=False))
        rates.append(batch / ours)
    at_8 = []
    for model in models:
        ours, theirs = lead(taken, model, 8)
        at_8.append(min(theirs.values()) / ours)
    fitting = [ratio for ratio in at_8 if math.isfinite(ratio)]
    print(
        f"{taken.name}\n  ratios "
        + ", ".join(f"{c.simulated:.2f}{'' if c.agrees else ' !!'}" for c in cells)
        + f" (rms {paper.rms_error(cells):.1%}); growth {rates[-1] / rates[0]:.2f}; at 8 "
        + ", ".join(f"{m} {ratio:.2f}" for m, ratio in zip(models, at_8, strict=True))
        + f": mean {sum(fitting) / len(fitting):.2f}",
        flush=True,
    )


def print_batches(taken: Assumptions, models: list[str], batches: list[int]) -> None:
    print(f"{taken.name}: seconds of a step, and the ratio to the best other")
    print(f"{'model':>6}{'batch':>7}{'autohete':>10}" + "".join(f"{o:>14}" for o in OTHERS)
          + f"{'ratio':>8}")  # fmt: skip
    for model in models:
        for batch in batches:
            ours, theirs = lead(taken, model, batch)
            figures = [ours, *theirs.values(), min(theirs.values()) / ours]
            cells = [f"{f:.2f}" if math.isfinite(f) else "-" for f in figures]
            print(f"{model:>6}{batch:>7}{cells[0]:>10}" + "".join(f"{c:>14}" for c in cells[1:4])
                  + f"{cells[4]:>8}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--models", nargs="+", default=["2b", "4b", "6b", "7b", "10b", "13b", "18b"]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument(
        "--by-batch", nargs="*", type=int, default=[1, 14], help="numbers of the sets"
    )
    options = parser.parse_args()
    print(f"{paper.FITTED}\nthe paper's ratios: ", end="")
    print(", ".join(f"{after / before:.2f}" for before, after in paper.FOUR_GPUS.values()))
    for number, taken in enumerate(SETS, 1):
        print(f"{number}. ", end="")
        print_set(taken, options.models)
    for number in options.by_batch:
        print(f"\n{number}. ", end="")
        print_batches(SETS[number - 1], options.models, options.batches)


if __name__ == "__main__":
    main()
