"""What `make dist` makes: whole, nobody else's libraries inside, and usable without a compiler."""

from __future__ import annotations

import json
import subprocess
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from buildtools import dist

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD_WHEEL = [
    "autohete/py.typed",
    "autohete/_C.pyi",
    "autohete/_build_info.py",
    "autohete/report/page.html",
    "autohete/_C.cpython-311-x86_64-linux-gnu.so",
    "autohete/_glpk.cpython-311-x86_64-linux-gnu.so",
]
GOOD_SOURCE = ["csrc/plan/plan.h", "buildtools/dist.py", "tests/oracle.py", "CHANGELOG.md"]
TAGGED = f"autohete-{dist.version()}-cp311-cp311-manylinux_2_35_x86_64.whl"


def wheel(folder: Path, names: Iterable[str], name: str = TAGGED) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for inside in names:
            archive.writestr(inside, "")
    return folder / name


def source(folder: Path, names: Iterable[str], version: str = dist.version()) -> Path:
    path = folder / f"autohete-{version}.tar.gz"
    empty = folder / "empty"
    empty.touch()
    with tarfile.open(path, "w:gz") as archive:
        for inside in names:
            archive.add(empty, arcname=f"autohete-{version}/{inside}")
    return path


def test_a_whole_wheel_and_archive_pass(tmp_path: Path) -> None:
    dist.check_wheel(wheel(tmp_path, GOOD_WHEEL))
    dist.check_source(source(tmp_path, GOOD_SOURCE))


@pytest.mark.parametrize(
    "library",
    ["autohete.libs/libglpk-1a2b.so.40", "autohete.libs/libtbb.so.12", "autohete/libc10.so"],
)
def test_a_wheel_that_carries_somebody_elses_library_is_refused(
    tmp_path: Path, library: str
) -> None:
    with pytest.raises(SystemExit, match=library):
        dist.check_wheel(wheel(tmp_path, [*GOOD_WHEEL, library]))


@pytest.mark.parametrize("lost", GOOD_WHEEL[:4])
def test_a_wheel_that_lacks_something_is_refused(tmp_path: Path, lost: str) -> None:
    with pytest.raises(SystemExit, match=lost):
        dist.check_wheel(wheel(tmp_path, [name for name in GOOD_WHEEL if name != lost]))


def test_a_wheel_of_another_version_or_without_a_manylinux_tag_is_refused(tmp_path: Path) -> None:
    for name in (TAGGED.replace(dist.version(), "9.9"), TAGGED.replace("manylinux_2_35", "linux")):
        with pytest.raises(SystemExit):
            dist.check_wheel(wheel(tmp_path, GOOD_WHEEL, name))


def test_an_archive_with_something_built_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"_C\.so"):
        dist.check_source(source(tmp_path, [*GOOD_SOURCE, "autohete/_C.so"]))


# ---------------------------------------------------------------- the real thing

# What a new user does, in an environment whose PATH has no compiler. The training compares itself
# with plain PyTorch to the bit and says so with its exit code.
JOURNEY = (
    "doctor --json",
    "plan gpt2 --gpu a100-40 --batch 2 --json",
    "demo --check --steps 3 --layers 4 --width 64 --json",
    "report gpt2 --gpu a100-40 --batch 2 --json",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_of_dist_works_in_a_fresh_environment_without_a_compiler(tmp_path: Path) -> None:
    found = list((ROOT / "dist").glob(f"autohete-{dist.version()}-*.whl"))
    if not found:
        pytest.skip("dist/ holds no wheel of this version; make dist")
    recorded = zipfile.ZipFile(found[0]).read("autohete/_build_info.py").decode()
    if f'"{torch.__version__}"' not in recorded:
        pytest.skip(f"the wheel in dist/ is for another torch than {torch.__version__}")
    dist.check_wheel(found[0])
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    install = [python, "-m", "pip", "install", "--quiet", f"torch=={torch.__version__}"]
    subprocess.run([*install, f"{found[0]}[report]"], check=True)
    bare = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    for arguments in JOURNEY:
        done = subprocess.run(
            [environment / "bin/autohete", *arguments.split()],
            cwd=tmp_path,
            env=bare,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (arguments, done.stderr)
        assert json.loads(done.stdout), arguments
    code = "import autohete._native as n; print(n.C.__file__)"
    where = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=bare, capture_output=True, text=True
    )
    assert Path(where.stdout.strip()).is_relative_to(environment), where.stderr
