"""A wrapped model that is trained by another optimizer than the one it was wrapped with.

An optimizer made after wrapping (`model = AutoHeteWrapper(...)`, then `AdamW(model.parameters())`)
trains right, but whole and after backward, and its state is in no plan. Who does that has to know.
There is no warning at its construction, nor at its first step: wrappers around our optimizer
(Lookahead, gradient accumulation) are optimizers over the same parameters, too. What is told is
that, twice, the step() of another changed the parameters by itself, with all of ours among its own,
while ours was not called since wrapping.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from autohete.run import Run

_BACKWARDS = 2  # without a step of ours, before steps of others are looked at
_STEPS = 2  # of another, before it is told

# Torch's hooks for the steps of all optimizers are of the process, so this is, too.
_WATCHING: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()


class OtherOptimizers:
    """Watches, from the second backward without a step of ours on, until the first one."""

    def __init__(self, run: Run) -> None:
        self._run = weakref.ref(run)
        self._optimizer = weakref.ref(run.optimizer)
        self._num_backwards = 0
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._over = not run.bridge.native  # others run their own step anyway

    def backward_over(self) -> None:
        """An outermost backward of the run has ended."""
        if self._over:
            return
        self._num_backwards += 1
        if self._num_backwards == _BACKWARDS:
            _hook()
            _WATCHING.add(self)

    def stop(self) -> None:
        """Ours was stepped, or the model is plain again: nothing is told any more."""
        self._over = True
        self._before.clear()
        _WATCHING.discard(self)

    def step_begins(self, optimizer: Optimizer) -> None:
        """The step() of any optimizer in the process begins."""
        if optimizer is self._optimizer():
            self.stop()
        elif (versions := self._versions_in(optimizer)) is not None:
            self._before[optimizer] = versions

    def step_over(self, optimizer: Optimizer) -> None:
        """It has ended; what ran inside it began and ended meanwhile."""
        before = self._before.pop(optimizer, None)
        if before is None or before == self._versions_in(optimizer):
            return
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        run, ours = self._run(), self._optimizer()
        if self._num_steps[optimizer] < _STEPS or run is None or ours is None:
            return
        self.stop()
        if run.owner is None or run.owner() is None:
            return  # a wrapper that nobody has any more
        name, wrapped = type(optimizer).__name__, type(ours).__name__
        warnings.warn(
            f"autohete: {name}.step() trains this model, expected step() of the {wrapped} that it "
            "was wrapped with, which was not called yet. The numbers are right, but the update "
            "runs whole, after backward, with state that is in no plan: make the optimizer first, "
            "wrap with it, and step that one",
            stacklevel=4,
        )

    def _versions_in(self, optimizer: Optimizer) -> int | None:
        """Return what every in-place change of our parameters raises; None: not all are its own."""
        ours = self._optimizer()
        parameters = _trained(ours) if ours is not None else []
        theirs = {id(p) for p in _trained(optimizer)}
        if not parameters or not all(id(p) in theirs for p in parameters):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return sum(p._version for p in parameters)


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@cache
def _hook() -> None:
    """For good: hooks that come and go would change torch's dict while it calls them."""
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_over)


def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        for watching in list(_WATCHING):
            watching.step_begins(optimizer)


def _step_over(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        for watching in list(_WATCHING):
            watching.step_over(optimizer)
