"""One planned model and one traced run that the report's tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from autohete.planning import plan_for
from autohete.planning.plan_report import PlanReport
from autohete.run_file import save_run
from autohete.run_report import RunReport


@pytest.fixture(scope="session")
def planned() -> PlanReport:
    return plan_for("gpt2", "a100-40", 4, 512, gpu_mem="3GiB", suggest=False)


@pytest.fixture(scope="session")
def traced() -> RunReport:
    """Of a small GPT on the host device; the trace covers whole steps."""
    from autohete.demo.traced import traced_run

    return traced_run(steps=7)


@pytest.fixture(scope="session")
def run_file(traced: RunReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "autohete_run.json"
    save_run(path, traced)
    return path
