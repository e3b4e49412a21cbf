"""The kernels on processors that this machine is not, emulated by qemu-user where it is installed.

The kernels are compiled as the extension's are, into a program without torch (which itself needs
more than the oldest x86-64).
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from autohete import _C
from buildtools.build_ext import CXX_FLAGS
from buildtools.prerequisites import find_tbb

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
pytestmark = [
    pytest.mark.slow,  # compiles every kernel
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    tbb = find_tbb()
    sources = [
        ROOT / "tests/native/kernel_bits.cpp",
        ROOT / "csrc/runtime/workers.cpp",
        *(ROOT / "csrc/base").glob("*.cpp"),
        *(ROOT / "csrc/kernels").glob("*.cpp"),
    ]
    objects = []
    for source in sources:
        target = folder / f"{source.stem}.o"
        command = ["g++", *CXX_FLAGS, f"-I{ROOT}", "-isystem", str(tbb.include_dir)]
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
        objects.append(str(target))
    folder_of_tbb = str(tbb.library_dir)
    link = [f"-L{folder_of_tbb}", "-l:libtbb.so.12", f"-Wl,-rpath,{folder_of_tbb}"]
    made = folder / "kernel_bits"
    subprocess.run(["g++", *objects, *link, "-o", str(made)], check=True)
    return made


def run(command: list[str], **env: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.parametrize("level", _C.cpu_features()["supported"])
def test_the_override_gives_the_same_bits_at_every_level(program: Path, level: str) -> None:
    want = run([str(program)])
    got = run([str(program)], AUTOHETE_CPU=level)
    assert got[0] == level
    assert got[1:] == want[1:]


@pytest.mark.skipif(QEMU is None, reason="qemu-user is not installed")
@pytest.mark.parametrize(
    ("cpu", "level"), [("qemu64", "scalar"), ("Nehalem", "scalar"), ("Haswell", "avx2")]
)
def test_an_emulated_processor_runs_its_own_level_and_gives_the_same_bits(
    program: Path, cpu: str, level: str
) -> None:
    assert QEMU is not None
    got = run([QEMU, "-cpu", cpu, str(program)])
    assert got[0] == level
    assert got[1:] == run([str(program)])[1:]
