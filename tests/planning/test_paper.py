"""The paper's tables beside the simulated ones."""

from __future__ import annotations

import json
import math

import pytest

from autohete import _C
from autohete.planning import paper
from autohete.planning.cluster import Cluster
from autohete.planning.library import profile_on
from autohete.planning.paper import Cell
from autohete.planning.paper_table import (
    format_paper_comparison,
    over_best_other,
    paper_comparison,
    priorities,
    small_memory,
)
from autohete.planning.strategies import plan_strategy


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return paper.single_gpu_cells()


def test_the_table_is_the_papers_and_only_two_rows_are_fitted(cells: list[Cell]) -> None:
    assert {(c.row, c.column): c.paper for c in cells} == {
        (model, system): figure
        for model, row in paper.TFLOPS.items()
        for system, figure in row.items()
    }
    assert {c.row for c in cells if c.fitted} == {"2b", "7b"}


def test_every_number_is_within_a_quarter_and_the_rms_within_12_percent(cells: list[Cell]) -> None:
    numbers = [cell for cell in cells if cell.is_number]
    assert len(numbers) == 9
    assert all(cell.agrees for cell in numbers), [(c.row, c.column, c.factor) for c in numbers]
    assert paper.rms_error(cells) <= 0.12


def test_only_the_cells_known_to_be_inconsistent_are_marked(cells: list[Cell]) -> None:
    marked = {(cell.row, cell.column) for cell in cells if not cell.agrees}
    assert marked == set(paper.KNOWN_MISMATCHES)


def test_the_rates_are_within_their_bounds() -> None:
    for name, (low, high) in paper.BOUNDS.items():
        assert low <= getattr(paper.FITTED, name) <= high


def test_a_cell_agrees_within_a_factor_either_way_or_where_both_do_not_fit() -> None:
    def cell(ours: float, theirs: float) -> Cell:
        return Cell("2b", "autohete", theirs, ours, fitted=True)

    assert cell(50, 40).agrees
    assert cell(40, 50).agrees
    assert not cell(50.1, 40).agrees
    assert not cell(40, 50.1).agrees
    assert cell(paper.OUT_OF_MEMORY, paper.OUT_OF_MEMORY).agrees
    assert not cell(40, paper.OUT_OF_MEMORY).agrees
    assert not cell(paper.OUT_OF_MEMORY, 40).agrees


def test_the_rms_is_that_of_the_logarithms_of_numbers_alone() -> None:
    cells = [
        Cell("2b", "a", 10, 10 * math.exp(0.3), fitted=True),
        Cell("2b", "b", 10, 10 * math.exp(-0.4), fitted=True),
        Cell("2b", "c", paper.OUT_OF_MEMORY, 30, fitted=True),
    ]
    assert paper.rms_error(cells) == pytest.approx(math.sqrt((0.09 + 0.16) / 2))


def test_four_gpus_are_predicted_within_a_quarter_and_all_numbers_within_12_percent(
    cells: list[Cell],
) -> None:
    four = paper.four_gpu_cells()
    assert [(cell.row, cell.fitted) for cell in four] == [
        (f"batch {batch}", False) for batch in paper.FOUR_GPUS
    ]
    assert all(cell.agrees for cell in four), [(c.row, c.factor) for c in four]
    assert paper.rms_error(cells + four) <= 0.12


def test_four_gpus_are_those_of_the_command_line_with_its_defaults() -> None:
    assert Cluster(4) == paper.CLUSTER


@pytest.mark.parametrize("system", ["zero_offload", "patrickstar", "stronghold"])
def test_the_others_recompute_every_layer(system: str) -> None:
    machine = paper.FITTED.machine
    profile = profile_on(paper.description("2b", 1), machine)
    budgets = _C.Budgets(machine.usable_bytes, machine.host_bytes)
    options = _C.PlannerOptions(early_uploads=True)
    plan = plan_strategy(system, profile, budgets, options, recompute=(True,))
    for unit, described in zip(plan.units, profile.units, strict=True):
        assert (unit.activations == _C.ActivationRule.RECOMPUTE) == described.can_recompute
    assert paper.samples_per_second("2b", 1, system) == 1 / plan.step_seconds
    free = plan_strategy(system, profile, budgets, options)
    assert free.step_seconds < plan.step_seconds  # so it is no choice of theirs


@pytest.mark.parametrize("model", ["7b", "13b"])
def test_autohete_leads_by_three_tenths(model: str) -> None:
    lead = over_best_other(model)
    assert set(lead) == {1, 2, 3, 4}
    assert all(ratio >= 1.3 for ratio in lead.values()), lead


def test_4b_and_6b_in_12_gb_beat_every_other_in_40_gb() -> None:
    for model in ("4b", "6b"):
        ratios = small_memory(model)
        assert set(ratios) == {1, 2, 4}
        assert all(ratio > 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(
    ("placement", "gated", "batch"),
    [
        ("parameters and state", True, None),
        ("parameters and state", True, 4),
        ("all state", False, None),
    ],
)
def test_priorities_shorten_the_step_by_15_percent_and_the_gap_by_half(
    placement: str, gated: bool, batch: int | None
) -> None:
    saved = priorities(placement, gated, batch)
    assert saved["step"] <= -0.15
    assert saved["gap"] <= -0.5


def test_without_a_queue_there_is_nothing_for_priorities_to_choose() -> None:
    # Parameters offloaded too: each gradient comes later than the CPU needs for the one before.
    saved = priorities("parameters and state", gated=False)
    assert saved["step"] == pytest.approx(0, abs=1e-9)
    assert saved["gap"] == pytest.approx(0, abs=1e-9)


def test_the_text_marks_mismatches_and_states_the_freedom_of_the_fit() -> None:
    figures = paper_comparison()
    json.dumps(figures)
    text = format_paper_comparison(figures)
    assert "OOM / " in text
    assert "!!" in text
    assert "5 knobs for 7 numbers" in text
    assert text.count("b=2: ") == 4
