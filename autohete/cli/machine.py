"""What `autohete doctor` reads of the machine: links, drivers, memory limits, NUMA.

From the kernel's files and nvidia-smi alone, so that it works where torch does not. The roots are
arguments: tests give folders of their own.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = "0x10de"
# GT/s of one lane -> generation.
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW state: 4 + 4 + 8 in fp32, 2 + 2 + 12 in half with fp32 masters."""


@dataclass(frozen=True)
class PcieLink:
    """A GPU's slot: what it runs at now (it may sleep), and what both ends could."""

    address: str
    generation: int
    width: int
    largest_generation: int
    largest_width: int
    numa_node: int

    def __str__(self) -> str:
        return (
            f"{self.address}: generation {self.generation} x{self.width}, up to "
            f"{self.largest_generation} x{self.largest_width}, NUMA node {self.numa_node}"
        )


def pcie_links(root: Path = Path("/sys/bus/pci/devices")) -> list[PcieLink]:
    """Return the links of NVIDIA's display and 3D controllers."""
    found = []
    for folder in sorted(root.glob("*")) if root.is_dir() else ():
        if _read(folder / "vendor") != _NVIDIA or not _read(folder / "class").startswith("0x03"):
            continue
        found.append(
            PcieLink(
                folder.name,
                _generation(_read(folder / "current_link_speed")),
                _number(_read(folder / "current_link_width")),
                _generation(_read(folder / "max_link_speed")),
                _number(_read(folder / "max_link_width")),
                int(_read(folder / "numa_node") or -1),
            )
        )
    return found


def driver_version(root: Path = Path("/proc/driver/nvidia")) -> str | None:
    """Return the NVIDIA driver's version, None without one."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read(root / "version"))
    if found:
        return found[1]
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line([smi, *query]) if smi else None


def toolkit_version() -> str | None:
    """Return the version of the CUDA toolkit on the PATH, None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release ([\d.]+)", done.stdout)
    return found[1] if found else None


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> list[str]:
    """Return the CPUs of each NUMA node, as "0-15"."""
    nodes = sorted(root.glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    return [_read(node / "cpulist") for node in nodes]


def memlock_bytes() -> int | None:
    """Return the limit on locked memory, None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def carries(num_bytes: int) -> str:
    """Say how many parameters an amount of memory carries with gradients and AdamW's state."""
    count = num_bytes / BYTES_PER_PARAMETER
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _generation(speed: str) -> int:
    return _GENERATIONS.get(speed.split(" ")[0], 0)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
