import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests/models.py, tests/oracle.py

# Two threads: oversubscribed OpenMP makes tiny models many times slower on small machines.
torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _no_profile_file_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
