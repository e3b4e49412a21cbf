"""The notebook runs from top to bottom, twice in one kernel, and shows pictures and progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "examples" / "quickstart.ipynb"


def outputs(notebook: Any, kind: str) -> list[Any]:
    return [
        output["data"][kind]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if kind in output.get("data", {})
    ]


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_every_cell_can_be_run_again_in_the_same_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent))  # the kernel starts elsewhere
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        for _ in range(2):  # from top to bottom, twice
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
    shown = outputs(notebook, "text/html")
    assert sum("<svg" in html for html in shown) >= 3  # two plans and the report
    assert any("<progress" in html and 'value="20"' in html for html in shown)
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "autohete_run.html autohete_run.json" in printed
    first, last = printed.split("loss ")[1].split("\n")[0].split(" -> ")
    assert float(last) < float(first)
