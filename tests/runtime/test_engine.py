"""The scheduler without torch, under random loops; with and without the sanitizers."""

from __future__ import annotations

import pytest

from tests.native.programs import PROGRAMS, run_case

CASES = PROGRAMS["engine"].case_names("stress_engine")


@pytest.mark.parametrize("sanitizers", ["", "thread", "address,undefined"])
@pytest.mark.parametrize("case", [c for c in CASES if "100000" not in c])
def test_engine_under_random_loops(case: str, sanitizers: str) -> None:
    run_case("engine", case, sanitizers)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if "100000" in c])
def test_engine_under_very_many_random_loops(case: str) -> None:
    run_case("engine", case)
