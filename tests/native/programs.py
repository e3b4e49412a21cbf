"""Build the C++ test programs and run their cases.

Each program is compiled with one plain compiler call per source, kept under build/native, and
compiled again only when a source or a header is newer.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "native"
FLAGS = [
    *("-std=c++20", "-g", "-O1", "-pthread", "-fno-omit-frame-pointer"),
    *("-Wall", "-Wextra", "-Wno-missing-field-initializers"),
]
SKIPPED = 77  # the exit status of a case that skipped itself

_LANES = ("csrc/runtime/transfer.cpp", "csrc/device/host_tier.cpp", "csrc/device/mapped_memory.cpp")
_HOST = (
    *_LANES,
    "csrc/device/host_device.cpp",
    "csrc/device/host_link.cpp",
    "csrc/device/host_store.cpp",
    "csrc/device/host_stream.cpp",
)
CUDA_SOURCES = ("csrc/device/cuda_device.cpp", "csrc/device/cuda_store.cpp")


@dataclass(frozen=True)
class Program:
    """What a test program is made of."""

    suites: tuple[str, ...]
    sources: tuple[str, ...]
    needs_cuda_headers: bool = False
    real_gpu: bool = False  # linked with the CUDA runtime instead of the stand-in

    def case_names(self, suite: str) -> list[str]:
        """Return the names of a suite's cases, read from its source."""
        text = (ROOT / "tests" / "native" / f"{suite}.cpp").read_text()
        return re.findall(r'^TEST_CASE\("(.*?)"\)', text, re.MULTILINE)


PROGRAMS = {
    "host": Program(
        suites=("suite_seam", "suite_transfer", "suite_host"),
        sources=("tests/native/side_host.cpp", *_HOST),
    ),
    "cuda": Program(
        suites=("suite_seam", "suite_transfer", "suite_cuda"),
        sources=(
            "tests/native/side_cuda.cpp",
            "tests/native/cudart_standin.cpp",
            *CUDA_SOURCES,
            *_LANES,
        ),
        needs_cuda_headers=True,
    ),
    "gpu": Program(
        suites=("suite_seam", "suite_transfer"),
        sources=("tests/native/side_cuda.cpp", *CUDA_SOURCES, *_LANES),
        needs_cuda_headers=True,
        real_gpu=True,
    ),
    "stress": Program(suites=("stress_transfer",), sources=_HOST),
    "engine": Program(
        suites=("stress_engine",),
        sources=(
            "csrc/runtime/engine.cpp",
            "csrc/runtime/engine_turns.cpp",
            "csrc/runtime/engine_updates.cpp",
            "csrc/runtime/in_order_lane.cpp",
            "csrc/runtime/update_lane.cpp",
            *_HOST,
        ),
    ),
}


def cuda_roots() -> list[Path]:
    """Return the places that hold CUDA's headers: toolkits, then the pip packages."""
    candidates = [Path(os.environ[k]) for k in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(k)]
    candidates += [
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    ]
    candidates += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*"))
    return [root for root in candidates if (root / "include" / "cuda_runtime_api.h").exists()]


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    return compiler


def _newest_header() -> float:
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("tests/native/*.h"), Path(__file__)]
    return max(header.stat().st_mtime for header in headers)


def _object(program: Program, source: str, sanitizers: str) -> tuple[Path, list[str]]:
    """Return where a source's object lies and the flags it needs; programs share what is equal."""
    flags = [f"-fsanitize={sanitizers}"] if sanitizers else []
    name = source.replace("/", "_")
    if "cuda" in name:
        flags += ["-isystem", str(cuda_roots()[0] / "include")]
        if program.real_gpu:
            flags.append("-DAUTOHETE_REAL_GPU")
            name += ".gpu"
    return OUTPUT / f"objects-{sanitizers or 'plain'}" / f"{name}.o", flags


def _compile(program: Program, source: str, sanitizers: str) -> Path:
    """Compile one source if it is out of date; its warnings are kept beside it in a .log file."""
    target, flags = _object(program, source, sanitizers)
    newest = max((ROOT / source).stat().st_mtime, _newest_header())
    if target.exists() and target.stat().st_mtime > newest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [_compiler(), *FLAGS, *flags, f"-I{ROOT}", "-c", source, "-o", str(target)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if result.returncode != 0:
        target.unlink(missing_ok=True)
        pytest.fail(f"{source} does not compile:\n{result.stderr}")
    target.with_suffix(".log").write_text(result.stderr)
    return target


def _cudart() -> list[str]:
    """Return the linker's arguments for the CUDA runtime library."""
    found = sorted(cuda_roots()[0].glob("lib*/libcudart.so*"))
    if not found:
        pytest.skip("no CUDA runtime library beside the headers")
    return [str(found[-1]), f"-Wl,-rpath,{found[-1].parent}"]


@contextlib.contextmanager
def _one_builder() -> Iterator[None]:
    """Keep other test processes from building: they share the objects."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        yield


@functools.cache
def build(name: str, sanitizers: str = "") -> Path:
    """Build a program, with `-fsanitize=sanitizers` if given, and return its path."""
    if PROGRAMS[name].needs_cuda_headers and not cuda_roots():
        pytest.skip("no CUDA headers (cuda_runtime_api.h) on this machine")
    with _one_builder():
        return _build(PROGRAMS[name], name, sanitizers)


def _build(program: Program, name: str, sanitizers: str) -> Path:
    sources = [*program.sources, *(f"tests/native/{suite}.cpp" for suite in program.suites)]
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(lambda source: _compile(program, source, sanitizers), sources))
    target = OUTPUT / f"{name}-{sanitizers or 'plain'}"
    if not target.exists() or target.stat().st_mtime < max(o.stat().st_mtime for o in objects):
        command = [_compiler(), *FLAGS, *map(str, objects), "-o", str(target)]
        command += [f"-fsanitize={sanitizers}"] if sanitizers else []
        subprocess.run([*command, *(_cudart() if program.real_gpu else [])], check=True)
    return target


def warnings_of(name: str, source: str) -> str:
    """Return what the compiler said about a source of a program."""
    build(name)
    return _object(PROGRAMS[name], source, "")[0].with_suffix(".log").read_text()


def run_case(name: str, case: str, sanitizers: str = "") -> None:
    """Run one case of a program; fail or skip as it does."""
    result = subprocess.run(
        [str(build(name, sanitizers)), "--run", case],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"},
    )
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    if result.returncode != 0:
        pytest.fail(f"exit status {result.returncode}\n{result.stdout}{result.stderr}")
