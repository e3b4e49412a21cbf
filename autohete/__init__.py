"""autohete trains transformers that do not fit the device, from the PyTorch loop you have."""

import torch  # noqa: F401  (its libraries must be loaded before ours)

from autohete.optim import CPUAdamW
from autohete.planning import InfeasibleError, Plan, load_profile, make_plan
from autohete.wrapper import AutoHeteWrapper

__all__ = ["AutoHeteWrapper", "CPUAdamW", "InfeasibleError", "Plan", "load_profile", "make_plan"]
