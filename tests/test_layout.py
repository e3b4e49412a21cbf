"""The rooms of the code and their floors: a floor uses only what lies below it.

Reads the includes of csrc and the imports of autohete. Headers of torch, oneTBB, GLPK, CUDA and
pybind11 each enter in the one place named here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# room -> rooms it may include from, besides itself.
CPP_ROOMS = {
    "base": set(),
    "kernels": {"base"},
    "device": {"base"},
    "plan": {"base", "device"},  # device: the memory tiers a plan speaks of
    "memory": {"base", "device"},
    "runtime": {"base", "kernels", "device", "plan", "memory"},
    "bindings": {"base", "kernels", "device", "plan", "memory", "runtime"},
}

# Kernels are handed the workers they run on; that header names no library.
CPP_EXCEPTIONS = {("kernels", "csrc/runtime/workers.h")}

# what an include starts with -> the files that may have it.
FOREIGN_HEADERS = {
    r"(torch|ATen|c10)/": r"bindings/.*|memory/unit_storage\.(h|cpp)",
    r"(tbb|oneapi)/": r"runtime/workers\.cpp",
    r"glpk\.h": r"plan/planner_glpk\.cpp",
    r"cuda": r"device/cuda_[a-z_]+\.(h|cpp)",
    r"(pybind11/|Python\.h)": r"bindings/.*|plan/planner_glpk\.cpp",
}

# Floors of the Python package, from the ground up. A module may import from its own floor and
# from floors below. Files not named here stand on the floor of the training path.
PYTHON_FLOORS = [
    {"_version", "_build_info", "_native", "_C", "_glpk"},
    {"units", "optim"},
    {"planning", "report"},
    {"config", "hooks", "checkpoint", "distributed", "wrapper"},
    {"integrations", "demo"},
    {"cli", "__main__"},
]
TRAINING_PATH = 3

CPP_FILES = sorted((ROOT / "csrc").rglob("*.h")) + sorted((ROOT / "csrc").rglob("*.cpp"))
PYTHON_FILES = sorted(f for f in (ROOT / "autohete").rglob("*.py") if f.name != "_build_info.py")


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.M)


def upward_includes(room: str, text: str) -> list[str]:
    """Includes of csrc that `room` may not have."""
    allowed = CPP_ROOMS[room] | {room}
    ours = [name for name in includes(text) if name.startswith("csrc/")]
    return [
        name
        for name in ours
        if name.split("/")[1] not in allowed and (room, name) not in CPP_EXCEPTIONS
    ]


def foreign_includes(path_in_csrc: str, text: str) -> list[str]:
    """Includes of other projects that belong into another file."""
    return [
        name
        for name in includes(text)
        for header, place in FOREIGN_HEADERS.items()
        if re.match(header, name) and not re.fullmatch(place, path_in_csrc)
    ]


def floor(module: str) -> int:
    """The floor of "autohete.wrapper" and the like; the package itself is the roof of the path."""
    parts = module.split(".")
    if len(parts) == 1:
        return TRAINING_PATH
    return next((i for i, names in enumerate(PYTHON_FLOORS) if parts[1] in names), TRAINING_PATH)


def imports(text: str) -> Iterator[str]:
    """Modules of autohete that the source imports, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "autohete")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the top: from autohete.x import y"
            if node.module == "autohete":
                yield from (f"autohete.{a.name}" for a in node.names)
            elif node.module and node.module.startswith("autohete."):
                yield node.module


def upward_imports(module: str, text: str) -> list[str]:
    return [name for name in imports(text) if floor(name) > floor(module)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CPP_FILES, ids=relative)
def test_no_include_points_upwards(path: Path) -> None:
    room = path.relative_to(ROOT / "csrc").parts[0]
    assert room in CPP_ROOMS, f"{relative(path)} stands in no room of the design"
    assert upward_includes(room, path.read_text()) == []


@pytest.mark.parametrize("path", CPP_FILES, ids=relative)
def test_foreign_headers_enter_in_their_one_place(path: Path) -> None:
    assert foreign_includes(path.relative_to(ROOT / "csrc").as_posix(), path.read_text()) == []


def test_no_two_headers_include_each_other() -> None:
    graph = {relative(p): includes(p.read_text()) for p in CPP_FILES if p.suffix == ".h"}

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        for below in graph.get(name, []):
            visit(below, (*above, name))

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_no_python_import_points_upwards(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if module == "autohete.__init__":
        module = "autohete"
    assert upward_imports(module, path.read_text()) == []


def test_the_rules_would_catch_each_kind_of_arrow() -> None:
    """The checks above on sources that break them."""
    assert upward_includes("device", '#include "csrc/runtime/workers.h"') == [
        "csrc/runtime/workers.h"
    ]
    assert upward_includes("runtime", '#include "csrc/runtime/workers.h"') == []
    assert foreign_includes("runtime/engine.cpp", "#include <torch/torch.h>") == ["torch/torch.h"]
    assert foreign_includes("runtime/engine.cpp", "#include <tbb/task.h>") == ["tbb/task.h"]
    assert foreign_includes("runtime/workers.cpp", "#include <tbb/task.h>") == []
    assert foreign_includes("plan/planner.cpp", "#include <glpk.h>") == ["glpk.h"]
    assert foreign_includes("device/host_device.cpp", "#  include <cuda_runtime.h>") != []
    assert upward_imports("autohete.wrapper", "import autohete.cli") == ["autohete.cli"]
    late = "def f():\n    from autohete.wrapper import AutoHeteWrapper"
    assert upward_imports("autohete.planning.make", late) == ["autohete.wrapper"]
    assert upward_imports("autohete.cli.demo", late) == []
