"""What is measured of this machine, beyond the planner's rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from autohete.planning import machine
from autohete.planning.machine import measure_machine, report_to_dict


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LARGEST", 1 << 20)
    monkeypatch.setattr(machine, "_LINK_SIZES", (4096, 1 << 20))
    monkeypatch.setattr(machine, "_NUM_PARAMETERS", 100_000)


@pytest.mark.usefixtures("small")
def test_every_rate_is_measured_kept_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    first = measure_machine(cache_dir=tmp_path, progress=told.append)
    assert first.dram_bytes_per_second > 0
    assert first.pin_seconds_per_gib > 0
    assert list(first.adamw_params_per_second) == [str(n) for n in machine._powers(first.cpus)]
    assert set(first.h2d_by_size) == set(first.d2h_by_size) == {"4096", str(1 << 20)}
    assert 0 < first.hardware["copy_share_during_cpu"] <= 1
    assert first.host_bytes > 0
    assert len(told) >= 6
    assert "CPU AdamW by threads" in str(first)

    def never(*args: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(machine, "_measure", never)
    again = measure_machine(cache_dir=tmp_path)
    kept = {"host_bytes": 0, "device_bytes": 0}
    assert {**report_to_dict(again), **kept} == {**report_to_dict(first), **kept}
    with pytest.raises(AssertionError, match="measured again"):
        measure_machine(cache_dir=tmp_path, refresh=True)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "report": {}}', '{"version": 9}'])
def test_a_damaged_report_is_measured_again(tmp_path: Path, text: str) -> None:
    path = machine.cache_path("host device|report", tmp_path)
    path.write_text(text)
    assert machine._read(path) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("figure", ["NaN", "-1.0", "Infinity", "null"])
def test_a_report_with_a_figure_that_is_none_is_measured_again(tmp_path: Path, figure: str) -> None:
    measured = measure_machine(cache_dir=tmp_path)
    path = machine.cache_path("host device|report", tmp_path)
    assert machine._read(path) is not None
    text = path.read_text()
    for kept in (measured.pin_seconds_per_gib, measured.h2d_by_size["4096"]):
        path.write_text(text.replace(repr(kept), figure))
        assert machine._read(path) is None


@pytest.mark.parametrize(("cpus", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_threads_double_up_to_all_cpus(cpus: int, counts: list[int]) -> None:
    assert machine._powers(cpus) == counts
