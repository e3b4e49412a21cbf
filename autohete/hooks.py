"""What runs around a unit's forward and backward.

A unit module's `forward` is replaced, on the instance, by a UnitForward; the root's by a
RootForward. The graph is left as it is: the start and end of a unit's backward are found with hooks
on its output and input tensors (a tensor's hook runs before the node that made it, so the hook of a
unit's input runs after everything inside the unit). That keeps in-place edits, dict outputs and
memory exactly as in plain PyTorch. See docs/adr/0004-tensor-hooks.md.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autohete.recompute import inside_outer_checkpoint, recompute_later
from autohete.tied import let_add_in_place, shared_parameters
from autohete.units import tensors_in

if TYPE_CHECKING:
    from autohete.run import Run


F = TypeVar("F", bound=Callable[..., Any])


def not_traced(function: F) -> F:
    """Keep torch.compile out of it; what was compiled by itself, inside or outside, stays so."""
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    disabled: F = disable(function)
    return disabled


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass (a recomputed forward, say)."""
    return torch._C._current_graph_task_id() != -1


def inside_transform() -> bool:
    """Return whether torch.func's grad, vmap or jvp runs: it has graphs of its own.

    Nothing is moved or recomputed there; guards still wait for newest values.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def _may_recompute() -> bool:
    return not in_backward() or inside_outer_checkpoint()


class HookedForward:
    """A module's forward with something around it. Copies and pickles are plain forwards.

    `deepcopy(module)` and `torch.save(module)` reach this object as an attribute of the module; the
    copy gets its class's own forward, bound to the copy.
    """

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.run: Run | None = run
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.was_on_instance = "forward" in vars(module)
        self.__name__ = "forward"
        self.__doc__ = self.forward.__doc__
        self.__signature__ = inspect.signature(self.forward)

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]

    def remove(self) -> None:
        """Put back what was there; whoever wrapped this object since keeps a plain forward."""
        if vars(self.module).get("forward") is self:
            if self.was_on_instance:
                self.module.forward = self.forward
            else:
                del self.module.forward
        self.run = None

    def _plain(self, module: nn.Module) -> Any:
        if self.was_on_instance and not isinstance(self.forward, HookedForward):
            return self.forward
        return types.MethodType(type(module).forward, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.was_on_instance and not isinstance(self.forward, HookedForward):
            return copy.deepcopy(self.forward, memo)
        return self._plain(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        # Unpickled before the module's attributes are set, so this finds the class's own forward.
        return getattr, (self.module, "forward")


class UnitForward(HookedForward):
    """Brings a unit's parameters in around its forward, and again around its backward."""

    def __init__(self, run: Run, module: nn.Module, unit: int) -> None:
        super().__init__(run, module)
        self.unit = unit
        self.shared = shared_parameters(run.units[unit])

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if run is None or inside_transform():
            return self.forward(*args, **kwargs)
        tracked = torch.is_grad_enabled()
        call = UnitCall(run, self.unit) if tracked else None
        if tracked and not run.user_checkpoints and not in_backward():
            run.user_checkpoints = inside_outer_checkpoint()
        run.enter_forward(self.unit, tracked)
        try:
            if call is not None:
                call.watch_inputs((args, kwargs))
            if tracked and run.recomputes(self.unit) and _may_recompute():
                out = recompute_later(run.units[self.unit], run.metered(self), args, kwargs)
            else:
                out = self.forward(*args, **kwargs)
        finally:
            run.leave_forward(self.unit, tracked)
        if call is not None:
            call.watch_outputs(out)
            if self.shared:
                for tensor in tensors_in(out):
                    let_add_in_place(tensor, self.shared)
        return out


class UnitCall:
    """One call of a unit, as its backward sees it: opens once, closes once, per backward pass."""

    __slots__ = ("is_open", "run", "unit")

    def __init__(self, run: Run, unit: int) -> None:
        self.run = run
        self.unit = unit
        self.is_open = False

    def watch_inputs(self, value: object) -> None:
        for tensor in tensors_in(value):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(self.close)

    def watch_outputs(self, value: object) -> None:
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                tensor.register_hook(self.open)

    def open(self, gradient: Tensor) -> None:
        """Run before the backward of the first node inside the unit."""
        if not self.is_open:
            self.is_open = True
            self.run.enter_backward(self)

    def close(self, gradient: Tensor) -> None:
        """Run after the backward of everything inside the unit."""
        if self.is_open:
            self.is_open = False
            self.run.leave_backward(self)


# They choose a fast path, of other rounding, by the class of tensors whose modules they have not
# called yet; a guarded one would send them the slow way.
PEEKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class PeekingForward(HookedForward):
    """Takes the guards off what a module of torch looks at before it calls the modules inside."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        super().__init__(run, module)
        looked_at = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
        seen = {id(p) for p in looked_at.parameters()}
        self.units = [
            index
            for index, unit in enumerate(run.units)
            if any(id(p) in seen for p in unit.parameters)
        ]

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if run is not None and not self.module.training and not in_backward():
            for index in self.units:
                run.settle_idle(index)
        return self.forward(*args, **kwargs)


class RootForward(HookedForward):
    """Begins and ends the forward of the whole model, and finds the end of its backward."""

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is None:
            return self.forward(*args, **kwargs)
        return as_root(self.run, self.forward, args, kwargs)


def as_root(
    run: Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `function` as the forward of the whole model; one inside another is fine."""
    if in_backward() or inside_transform():
        return function(*args, **kwargs)
    with run.lock:
        run.begin_forward(args, kwargs)
        try:
            out = function(*args, **kwargs)
        except BaseException:
            run.abandon()
            raise
        run.end_forward()
    if torch.is_grad_enabled():
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(run.begin_backward)
    return out
