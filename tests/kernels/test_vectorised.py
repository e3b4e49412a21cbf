"""The compiled kernels really use the registers of their level, and only those."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest
import torch  # noqa: F401  (the extension needs its libraries)

from autohete import _C

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None,
    reason="needs objdump and x86-64",
)

KERNELS = ["adamw_tile", "sgd_tile", "lion_tile", "stats_tile", "cast_tile", "hash_run"]
ARITHMETIC = ["sqrtps", "divps", "mulps", "addps", "subps"]


@pytest.fixture(scope="module")
def functions() -> dict[str, str]:
    """Return the disassembly of each function of the extension, by its mangled name."""
    command = ["objdump", "-d", "--no-show-raw-insn", _C.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for part in text.split("\n\n"):
        if match := re.match(r"\s*[0-9a-f]+ <(\S+)>:\n", part):
            found[match.group(1)] = part
    return found


def body(functions: dict[str, str], kernel: str, level: str) -> str:
    names = [name for name in functions if f"{kernel}_{level}" in name]
    if not names:
        pytest.skip("the extension was stripped of its symbols")
    return "\n".join(functions[name] for name in names)


@pytest.mark.parametrize(("level", "register"), [("avx2", "%ymm"), ("avx512", "%zmm")])
def test_the_update_does_its_arithmetic_in_whole_registers(
    functions: dict[str, str], level: str, register: str
) -> None:
    code = body(functions, "adamw_tile", level)
    for operation in ARITHMETIC:
        assert re.search(rf"\bv{operation}\s.*{register}", code), operation


@pytest.mark.parametrize(
    ("kernel", "level", "register"),
    [("hash_run", "scalar", "%xmm"), ("hash_run", "avx2", "%ymm"), ("digests", "avx512", "%zmm")],
)
def test_the_hash_multiplies_words_in_whole_registers(
    functions: dict[str, str], kernel: str, level: str, register: str
) -> None:
    assert re.search(rf"\bv?pmuludq\s.*{register}", body(functions, kernel, level))


def test_the_plain_level_does_its_arithmetic_four_at_a_time(functions: dict[str, str]) -> None:
    code = body(functions, "adamw_tile", "scalar")
    for operation in ARITHMETIC:
        assert re.search(rf"\b{operation}\s", code), operation


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_level_uses_registers_of_a_higher_one(functions: dict[str, str], kernel: str) -> None:
    assert not re.search(r"%[yz]mm|\bv[a-z0-9]+\s", body(functions, kernel, "scalar"))
    assert not re.search(r"%zmm|%k[1-7]", body(functions, kernel, "avx2"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_no_level_fuses_multiply_and_add(
    functions: dict[str, str], kernel: str, level: str
) -> None:
    assert not re.search(r"\bvfn?m(add|sub)", body(functions, kernel, level))


def test_nothing_outside_the_levels_needs_more_than_plain_x86_64(
    functions: dict[str, str],
) -> None:
    body(functions, "adamw_tile", "scalar")  # skips when there are no symbols to tell by
    wide = re.compile(r"%[yz]mm|\bv[a-z]+[ps][sd]\s")
    strays = [
        name
        for name, code in functions.items()
        if wide.search(code) and not re.search("_avx2|_avx512", name)
    ]
    assert strays == []
