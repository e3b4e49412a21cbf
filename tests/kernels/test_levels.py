"""The choice of the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autohete import _C

PROGRAM = "import torch; from autohete import _C; print(_C.cpu_features()['level'])"


def level_with(name: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "AUTOHETE_CPU": name}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("level", _C.cpu_features()["supported"])
def test_the_environment_chooses_a_level(level: str) -> None:
    assert level_with(level).stdout.strip() == level


def test_the_highest_supported_level_is_the_default() -> None:
    assert level_with("").stdout.strip() == _C.cpu_features()["supported"][-1]


def test_an_unknown_level_is_refused_by_name() -> None:
    result = level_with("mmx")
    assert result.returncode != 0
    assert (
        "ValueError: AUTOHETE_CPU: level is 'mmx', expected scalar, avx2 or avx512" in result.stderr
    )
