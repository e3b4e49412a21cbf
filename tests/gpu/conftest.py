"""Tests on a real GPU: marked `gpu`, skipped where torch sees none.

Those of test_gpu_placement.py need copies only, so they also run on a CUDA emulation (see
benchmarks/cuda_emulation.py); the others need every kernel.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# cuBLAS repeats itself to the bit only with a workspace of fixed size; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def _repeatable_kernels():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
