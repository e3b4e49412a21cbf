"""Builds autohete._C (core and torch bindings) and autohete._glpk (the GLPK solver, on its own)."""
import glob
import os
import sys
import sysconfig

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = os.path.dirname(os.path.abspath(__file__))
PREFIX = sys.prefix
PURELIB = sysconfig.get_paths()["purelib"]
CMEEL = os.path.join(PURELIB, "cmeel.prefix")
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]

separate = {"csrc/plan/planner_glpk.cpp", "csrc/device/cuda_device.cpp", "csrc/device/cuda_store.cpp"}
sources = sorted(
    s for s in glob.glob("csrc/**/*.cpp", recursive=True, root_dir=HERE) if s not in separate
)
extensions = [
    CppExtension(
        "autohete._C", sources,
        include_dirs=[HERE, os.path.join(PREFIX, "include")],
        library_dirs=[os.path.join(PREFIX, "lib")], libraries=["tbb"],
        extra_compile_args=FLAGS,
        extra_link_args=["-Wl,-rpath," + os.path.join(PREFIX, "lib")],
    )
]
if os.path.exists("csrc/plan/planner_glpk.cpp"):
    extensions.append(
        CppExtension(
            "autohete._glpk", ["csrc/plan/planner_glpk.cpp"],
            include_dirs=[HERE, os.path.join(CMEEL, "include")],
            extra_compile_args=FLAGS,
            extra_link_args=[os.path.join(CMEEL, "lib", "libglpk.so.40"), "-Wl,-rpath," + os.path.join(CMEEL, "lib")],
        )
    )
setup(name="autohete", version="0.1.0", packages=["autohete"], ext_modules=extensions,
      cmdclass={"build_ext": BuildExtension})
