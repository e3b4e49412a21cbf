"""Keep torch's compiler from being imported in a command that compiles nothing.

torch's shape functions for the meta device import `torch._dynamo` on first use, to tell it not to
trace them. That takes as long as torch itself: a second of the three that an answer may take. A
command's process is ours and ends with the answer, so a stand-in that says "not traced" is enough
there. This is no place for a library: a user's process may compile later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Have `torch._dynamo.disable` return the function itself; does nothing if it is imported."""
    if _NAME in sys.modules:
        yield
        return
    import torch

    stand_in: Any = ModuleType(_NAME)

    def disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return fn

    stand_in.disable = disable
    sys.modules[_NAME] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo
