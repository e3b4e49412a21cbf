"""What only the host device promises: link speed, test controls, fork, its memory."""

from __future__ import annotations

import pytest

from tests.native.programs import PROGRAMS, run_case


@pytest.mark.parametrize("case", PROGRAMS["host"].case_names("suite_host"))
def test_host_device(case: str) -> None:
    run_case("host", case)
