"""What doctor reads of a machine, on folders that stand for the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from autohete.cli import doctor, machine
from autohete.cli.machine import PcieLink


def device(root: Path, name: str, **files: str) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text + "\n")


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    gpu = {
        "vendor": "0x10de",
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
        "numa_node": "1",
    }
    device(tmp_path, "0000:65:00.0", **gpu, **{"class": "0x030200", "current_link_width": "8"})
    device(tmp_path, "0000:65:00.1", **gpu, **{"class": "0x040300", "current_link_width": "8"})
    device(tmp_path, "0000:01:00.0", vendor="0x8086", **{"class": "0x030000"})
    return tmp_path


def test_a_gpus_link_is_read_and_sound_and_others_are_passed_over(bus: Path) -> None:
    assert machine.pcie_links(bus) == [PcieLink("0000:65:00.0", 4, 8, 5, 16, 1)]


def test_a_machine_without_a_bus_has_no_links(tmp_path: Path) -> None:
    assert machine.pcie_links(tmp_path / "nothing") == []


def test_fewer_lanes_than_the_gpu_has_is_a_warning_with_a_remedy(
    bus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = machine.pcie_links(bus)
    monkeypatch.setattr(machine, "pcie_links", lambda: links)
    finding = doctor.pcie()
    assert finding.status == "warning"
    assert "generation 4 x8, up to 5 x16" in finding.detail
    assert "slot" in finding.remedy


def test_two_nodes_are_a_warning_that_names_the_gpus(
    bus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = machine.pcie_links(bus)
    monkeypatch.setattr(machine, "pcie_links", lambda: links)
    monkeypatch.setattr(machine, "numa_nodes", lambda: ["0-15", "16-31"])
    finding = doctor.numa()
    assert finding.status == "warning"
    assert finding.remedy.startswith("numactl --cpunodebind=1 --membind=1")


def test_nodes_are_read_in_order(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-3"), (1, "4-7"), (10, "8-11")):
        device(tmp_path, f"node{number}", cpulist=cpus)
    assert machine.numa_nodes(tmp_path) == ["0-3", "4-7", "8-11"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", "535.183.01"),
        (
            "NVRM version: UNIX Open Kernel Module for x86_64  580.95.05  Release",
            "580.95.05",
        ),
    ],
)
def test_the_drivers_version_is_read(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert machine.driver_version(tmp_path) == version


def test_memory_is_told_in_parameters() -> None:
    assert machine.carries(16 * 7 * 10**9) == "7.0B"
    assert machine.carries(16 * 125 * 10**6) == "125M"


def test_doctor_looks_at_everything_a_bug_report_needs() -> None:
    names = {finding.name for finding in doctor.examine()}
    assert names >= {
        "python", "torch", "compiled core", "GLPK", "instruction set", "cores", "GPU",
        "GPU driver", "CUDA toolkit", "PCIe", "device memory", "host memory", "locked memory",
        "NUMA",
    }  # fmt: skip
