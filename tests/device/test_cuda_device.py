"""What only the CUDA side promises. On a stand-in for the CUDA runtime, or on a GPU (marked)."""

from __future__ import annotations

import pytest

from tests.native.programs import CUDA_SOURCES, PROGRAMS, ROOT, run_case, warnings_of


@pytest.mark.parametrize("case", PROGRAMS["cuda"].case_names("suite_cuda"))
def test_cuda_device(case: str) -> None:
    run_case("cuda", case)


@pytest.mark.parametrize("source", CUDA_SOURCES)
def test_the_cuda_code_compiles_without_warnings(source: str) -> None:
    assert warnings_of("cuda", source) == ""


def test_only_the_cuda_files_include_cuda() -> None:
    including = {
        str(path.relative_to(ROOT))
        for pattern in ("csrc/**/*.h", "csrc/**/*.cpp")
        for path in ROOT.glob(pattern)
        if "#include <cuda" in path.read_text() or "csrc/device/cuda_check.h" in path.read_text()
    }
    assert including == {"csrc/device/cuda_check.h", *CUDA_SOURCES}


@pytest.mark.gpu
@pytest.mark.parametrize("suite", PROGRAMS["gpu"].suites)
def test_the_seam_and_the_lanes_hold_on_a_gpu(suite: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    ran = 0
    for case in PROGRAMS["gpu"].case_names(suite):
        try:
            run_case("gpu", case)
            ran += 1
        except pytest.skip.Exception:  # a case that needs copies held or failed on command
            continue
    assert ran > 5
