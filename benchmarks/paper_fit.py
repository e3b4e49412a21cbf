"""Fit the rates and batches of `autohete simulate --table paper` to its 2B and 7B rows.

    python benchmarks/paper_fit.py              within the bounds of paper.py
    python benchmarks/paper_fit.py --slow-link  with links down to 8 GB/s: what the bound does

The 13B row takes no part; its error is printed after the choice. Deterministic; some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random

from autohete.planning import paper

BATCHES = [
    (two, seven) for two, seven in itertools.product(range(1, 9), range(1, 5)) if two >= seven
]
NUM_STARTS = 60
Rates = tuple[float, ...]


def fit_rates(batches: tuple[int, int], bounds: list[tuple[float, float]]) -> tuple[float, Rates]:
    """Return the rms error of the fitted rows and the rates, for these batches."""

    def error(rates: Rates) -> float:
        if any(not low <= rate <= high for rate, (low, high) in zip(rates, bounds, strict=True)):
            return math.inf
        cells = paper.single_gpu_cells(paper.Fit(*rates, *batches), paper.FITTED_MODELS)
        expected = [cell for cell in cells if cell.paper > 0]
        if any(cell.simulated == paper.OUT_OF_MEMORY for cell in expected):
            return math.inf
        return paper.rms_error(expected)

    rng = random.Random(0)
    starts: list[Rates] = [
        tuple(math.exp(rng.uniform(math.log(low), math.log(high))) for low, high in bounds)
        for _ in range(NUM_STARTS)
    ]
    starts.append(tuple(getattr(paper.FITTED, name) for name in paper.BOUNDS))
    least, best = min((error(start), start) for start in starts)
    step = 0.3
    while step > 0.002:
        moved = False
        for i, factor in itertools.product(range(len(bounds)), (1 + step, 1 / (1 + step))):
            rates = tuple(r * factor if j == i else r for j, r in enumerate(best))
            tried = error(rates)
            if tried < least - 1e-6:
                least, best, moved = tried, rates, True
        if not moved:
            step /= 2
    return least, best


def main() -> None:
    """Fit for every pair of batches and print the best few."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow-link", action="store_true")
    bounds = dict(paper.BOUNDS)
    if parser.parse_args().slow_link:
        bounds["link_bytes_per_second"] = (8e9, 25.5e9)
    found = sorted((*fit_rates(batches, list(bounds.values())), batches) for batches in BATCHES)
    print(f"{'2B':>4}{'7B':>4}{'13B':>5}{'fitted rms':>12}{'13B off by':>12}  rates")
    for error, rates, batches in found[:6]:
        fit = paper.Fit(*rates, *batches)
        row = [cell for cell in paper.single_gpu_cells(fit, ("13b",)) if cell.is_number]
        worst = max(max(cell.factor, 1 / cell.factor) for cell in row)
        names = ", ".join(f"{n} {r:.4g}" for n, r in zip(bounds, rates, strict=True))
        print(
            f"{batches[0]:>4}{batches[1]:>4}{fit.batches['13b']:>5}{error:>12.2%}"
            f"{'x' + format(worst, '.2f'):>12}  {names}"
        )


if __name__ == "__main__":
    main()
