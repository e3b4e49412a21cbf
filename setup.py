"""Builds autohete's native modules; names, versions and dependencies stand in pyproject.toml.

Use it as `pip install --no-build-isolation .` in an environment that has torch: the modules are
built against that torch and work with that one only. AUTOHETE_CUDA=0 leaves CUDA out,
AUTOHETE_WERROR=1 makes warnings errors, MAX_JOBS=N bounds the compilers at work.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))
from buildtools.prerequisites import MissingPrerequisiteError, import_torch


def missing_torch(line: str) -> type[build_ext]:
    """A build_ext that stops with `line`; a source archive can be made without torch."""

    class MissingTorch(build_ext):  # type: ignore[misc]
        def run(self) -> None:
            sys.exit(line)

    return MissingTorch


try:
    import_torch()
    from buildtools.build_ext import NativeBuild, extensions

    setup(ext_modules=extensions(), cmdclass={"build_ext": NativeBuild})
except MissingPrerequisiteError as missing:
    from setuptools import Extension

    setup(
        ext_modules=[Extension("autohete._C", [])],
        cmdclass={"build_ext": missing_torch(f"autohete: {missing}")},
    )
