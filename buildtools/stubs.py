"""Write autohete/_C.pyi from the built module: `make stubs`, after a change of the bindings."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parent.parent / "autohete" / "_C.pyi"

_GENERATE = """
import sys
import autohete._native
from pybind11_stubgen import main
sys.argv = ["pybind11-stubgen", "autohete._C", "-o", sys.argv[1], "--ignore-all-errors"]
main()
"""


def generate() -> str:
    """Return the stub of the module as it is built now."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", _GENERATE, folder], check=True, cwd=STUB.parent.parent
        )
        text = (Path(folder) / "autohete" / "_C.pyi").read_text()
    # Written without type arguments by the generator; mypy's strict mode wants them.
    for name, full in (
        ("list", "list[typing.Any]"),
        ("dict", "dict[str, typing.Any]"),
        ("tuple", "tuple[typing.Any, ...]"),
    ):
        text = text.replace(f"-> {name}:", f"-> {full}:")
        text = text.replace(f": {name} = ", f": {full} = ").replace(f": {name},", f": {full},")
        text = text.replace(f": {name})", f": {full})")
    text = text.replace("collections.abc.Callable)", "collections.abc.Callable[..., typing.Any])")
    return text.replace("collections.abc.Callable,", "collections.abc.Callable[..., typing.Any],")


if __name__ == "__main__":
    STUB.write_text(generate())
