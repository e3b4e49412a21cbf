"""Find the CUDA toolkit that belongs to a CUDA build of torch.

Only headers and libcudart are used: no nvcc, no driver, no GPU. torch's own guess of CUDA_HOME is
not used: nvcc can be a script that stands outside the toolkit, and the guess follows the script.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buildtools.prerequisites import MissingPrerequisiteError

SYSTEM_ROOT = Path("/usr/local")

# cuda_runtime_api.h needs the second one, which is a pip package of its own.
_HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "crt/host_defines.h")


@dataclass(frozen=True)
class CudaToolkit:
    """Headers of one toolkit, and the libcudart that torch loads too."""

    include_dir: Path
    library: Path
    version: tuple[int, int]


def find_cuda(torch_cuda: str) -> CudaToolkit | None:
    """Return the toolkit for a torch built with CUDA `torch_cuda` ("13.0"), or None.

    Raises MissingPrerequisiteError when toolkits are here but all are older than torch's CUDA.
    """
    wanted = _parse(torch_cuda)
    too_old: list[str] = []
    for include in include_dirs(wanted[0]):
        version = toolkit_version(include)
        if version is None or version[0] > wanted[0]:
            continue  # another major version is another libcudart in the same process
        if version < wanted:
            too_old.append(f"{include.parent} is {version[0]}.{version[1]}")
            continue
        library = _find_cudart(include, wanted[0])
        if library is not None:
            return CudaToolkit(include, library, version)
    if too_old:
        raise MissingPrerequisiteError(
            f"the CUDA toolkit at {too_old[0]}, torch was built with {torch_cuda}; point CUDA_HOME "
            f"at a toolkit {torch_cuda}, {_pip_command(wanted)}, or build without CUDA: "
            "AUTOHETE_CUDA=0"
        )
    return None


def not_found_notice(torch_cuda: str) -> str:
    """One line for a CUDA build of torch without a toolkit."""
    return (
        f"torch was built with CUDA {torch_cuda} but no toolkit {torch_cuda} is here, so GPUs are "
        f"left out of this build; point CUDA_HOME at one or {_pip_command(_parse(torch_cuda))}, "
        "then build again"
    )


def include_dirs(major: int) -> list[Path]:
    """Folders with a complete set of runtime headers, the likeliest first."""
    return [d for d in dict.fromkeys(_candidates(major)) if all((d / h).exists() for h in _HEADERS)]


def toolkit_version(include: Path) -> tuple[int, int] | None:
    """Read CUDART_VERSION (13000 is 13.0) from the headers."""
    text = (include / "cuda_runtime_api.h").read_text(errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return divmod(int(found[1]) // 10, 100) if found else None


def _candidates(major: int) -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "include")
    for folder in _pip_folders(major):
        yield folder / "include"
    for toolkit in _toolkits(major):
        yield toolkit / "include"
        yield from sorted(toolkit.glob("targets/*/include"))


def _pip_folders(major: int) -> list[Path]:
    """nvidia/cu13 since CUDA 13, nvidia/cuda_runtime before."""
    names = (f"nvidia/cu{major}", "nvidia/cuda_runtime")
    return [Path(entry, name) for entry in sys.path if entry for name in names]


def _toolkits(major: int) -> Iterator[Path]:
    nvcc = shutil.which("nvcc")
    if nvcc:
        real = Path(nvcc).resolve()
        yield from _nvcc_roots(real)
    yield Path(sys.prefix)  # conda
    yield SYSTEM_ROOT / "cuda"
    yield from sorted(SYSTEM_ROOT.glob(f"cuda-{major}*"), reverse=True)


def _nvcc_roots(nvcc: Path) -> Iterator[Path]:
    """The toolkit of an nvcc that may be a script which starts the real one."""
    yield nvcc.parent.parent
    if nvcc.stat().st_size > 65536:
        return
    for named in re.findall(r"(/[^\s\"']+)/bin/nvcc", nvcc.read_text(errors="replace")):
        yield Path(named)


def _find_cudart(include: Path, major: int) -> Path | None:
    """Prefer the pip package's library: it is the file that torch itself loads."""
    folders = [folder / "lib" for folder in _pip_folders(major)]
    folders += [include.parent / sub for sub in ("lib64", "lib")]
    folders += [Path(sys.prefix, "lib")]
    for folder in folders:
        library = folder / f"libcudart.so.{major}"
        if library.exists():
            return library
    return None


def _parse(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _pip_command(version: tuple[int, int]) -> str:
    major, minor = version
    if major >= 13:
        names = ["nvidia-cuda-runtime", "nvidia-cuda-crt"]
    else:
        names = [f"nvidia-cuda-runtime-cu{major}", f"nvidia-cuda-nvcc-cu{major}"]
    return "`pip install " + " ".join(f"'{name}=={major}.{minor}.*'" for name in names) + "`"
