"""What the transfer lanes promise, on the host device and on CUDA's stand-in runtime."""

from __future__ import annotations

import pytest

from tests.native.programs import PROGRAMS, run_case


@pytest.mark.parametrize("side", ["host", "cuda"])
@pytest.mark.parametrize("case", PROGRAMS["host"].case_names("suite_transfer"))
def test_transfer(side: str, case: str) -> None:
    run_case(side, case)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
@pytest.mark.parametrize("side", ["host", "cuda"])
def test_transfer_is_clean_under_the_sanitizers(side: str, sanitizers: str) -> None:
    for case in PROGRAMS[side].case_names("suite_transfer"):
        try:
            run_case(side, case, sanitizers)
        except pytest.skip.Exception:  # a case that this side cannot have
            continue


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["", "thread", "address,undefined"])
@pytest.mark.parametrize("case", PROGRAMS["stress"].case_names("stress_transfer"))
def test_transfer_under_load(case: str, sanitizers: str) -> None:
    run_case("stress", case, sanitizers)
