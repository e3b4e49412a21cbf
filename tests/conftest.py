import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests/models.py, tests/oracle.py

# Tiny models on a small machine, and one test process per core: threads only get in the way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_profile_file_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
