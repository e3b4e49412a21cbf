"""Sphinx: Markdown pages through MyST, the reference from docstrings; see `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autohete._version import __version__  # noqa: E402

project = "autohete"
author = "the autohete authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "literal"  # `name` in docstrings is code

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"  # light and dark, no request to other servers
html_title = f"autohete {release}"
html_copy_source = False
