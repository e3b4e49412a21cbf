"""`autohete plan` imports no compiler and no transformers for a preset, and answers the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ASK = """
import sys
from autohete.cli.main import group
group(['plan', 'gpt2', '--gpu', 'a100-40', '--batch', '2', '--json'], standalone_mode=False)
import torch
print(sorted({'transformers', 'torch._dynamo'} & set(sys.modules)), file=sys.stderr)
print(torch.cuda.is_initialized(), file=sys.stderr)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_nothing_slow_is_imported_and_cuda_is_not_initialised() -> None:
    done = run(ASK)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["[]", "False"]


def test_the_answer_is_that_of_the_real_compiler_being_there() -> None:
    assert run(ASK).stdout == run("import torch._dynamo" + ASK).stdout


def test_the_compiler_can_be_imported_and_used_afterwards() -> None:
    code = (
        "from autohete.cli.quick import without_compiler\n"
        "import torch\n"
        "with without_compiler():\n"
        "    torch.empty(3, device='meta').normal_()\n"
        "import torch._dynamo\n"
        "print(torch._dynamo.config.verbose, torch._dynamo.__file__)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "_dynamo/__init__.py" in done.stdout
