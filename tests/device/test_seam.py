"""What both sides of the device seam promise: the host device, and CUDA on a stand-in runtime."""

from __future__ import annotations

import pytest

from tests.native.programs import PROGRAMS, run_case


@pytest.mark.parametrize("side", ["host", "cuda"])
@pytest.mark.parametrize("case", PROGRAMS["host"].case_names("suite_seam"))
def test_seam(side: str, case: str) -> None:
    run_case(side, case)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
@pytest.mark.parametrize("side", ["host", "cuda"])
def test_seam_is_clean_under_the_sanitizers(side: str, sanitizers: str) -> None:
    for case in PROGRAMS[side].case_names("suite_seam"):
        run_case(side, case, sanitizers)
