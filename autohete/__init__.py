"""autohete trains transformers that do not fit the device, from the PyTorch loop you have.

    from autohete import AutoHeteWrapper

Names are imported when they are first used: `import autohete` costs nothing, and `autohete doctor`
runs where the compiled core or torch does not load.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autohete._version import __version__

if TYPE_CHECKING:
    from autohete.optim import CPUSGD, CPUAdam, CPUAdamW, CPULion
    from autohete.planning import InfeasibleError, Plan, load_profile, make_plan  # type: ignore[no-redef]
    from autohete.sharded_updates import ShardedUpdates
    from autohete.wrapper import AutoHeteWrapper

__all__ = [
    "CPUSGD",
    "AutoHeteWrapper",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "InfeasibleError",
    "Plan",
    "ShardedUpdates",
    "__version__",
    "load_profile",
    "make_plan",
]

_HOMES = {
    "AutoHeteWrapper": "autohete.wrapper",
    "CPUAdam": "autohete.optim",
    "CPUAdamW": "autohete.optim",
    "CPULion": "autohete.optim",
    "CPUSGD": "autohete.optim",
    "InfeasibleError": "autohete.planning",
    "Plan": "autohete.planning",
    "ShardedUpdates": "autohete.sharded_updates",
    "load_profile": "autohete.planning",
    "make_plan": "autohete.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autohete' has no attribute {name!r}")
    importlib.import_module("autohete._native")  # says what is wrong with the build, if anything
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
