"""Sweeps over batch and device memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from autohete.planning.sweep import (
    NUM_MEMORIES,
    format_sweep,
    sweep_batch,
    sweep_gpu_mem,
)
from autohete.report.content import content_of_sweep
from autohete.report.pictures import save_picture


def test_a_sweep_over_the_batch_ends_with_the_first_that_does_not_fit() -> None:
    points = sweep_batch("gpt2", "a100-40", 512, gpu_mem="3GB")
    assert [point.value for point in points[:3]] == [1, 2, 3]
    assert all(point.report is not None for point in points[:-1])
    assert points[-1].report is None
    assert points[-1].smallest_gpu_mem > 3e9
    rows = format_sweep("batch", points).splitlines()
    assert len(rows) == 1 + len(points)
    assert "does not fit; it needs" in rows[-1]


def test_a_sweep_over_memory_starts_at_the_least_and_more_is_never_slower() -> None:
    points = sweep_gpu_mem("gpt2", "a100-40", 2, 512, gpu_mem="4GB")
    assert len(points) == NUM_MEMORIES
    assert points[-1].value == 4_000_000_000
    figures = [point.to_dict() for point in points]
    assert all(f["fits"] and f["device_peak_bytes"] <= f["value"] for f in figures)
    seconds = [f["step_seconds"] for f in figures]
    assert seconds[-1] < seconds[0]
    assert all(later <= before * 1.01 for before, later in itertools.pairwise(seconds))


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_sweep_is_drawn_to_a_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"curve{ending}"
    points = sweep_batch("gpt2", "a100-40", 128, gpu_mem="2GB")
    save_picture(path, content_of_sweep("batch", points).figures())
    assert path.stat().st_size > 1000
