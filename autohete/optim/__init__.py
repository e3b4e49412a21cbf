"""Optimizers that update on the CPU in one pass over memory, usable by themselves.

They take and save what their torch.optim namesakes do.
"""

from autohete.optim.adam import CPUAdam, CPUAdamW, hyper_of
from autohete.optim.base import CPUOptimizer
from autohete.optim.lion import CPULion
from autohete.optim.sgd import CPUSGD
from autohete.optim.states import loaded_state

__all__ = ["CPUSGD", "CPUAdam", "CPUAdamW", "CPULion", "CPUOptimizer", "hyper_of", "loaded_state"]
