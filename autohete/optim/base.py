"""What the CPU optimizers share: masters, layouts, loading, AMP, and one native call a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from autohete import _C
from autohete.optim.checks import inverse_scale, whole_number
from autohete.optim.sharded import PartOf, is_sharded
from autohete.optim.states import (
    FP32_KEYS,
    StatePools,
    check_kind,
    check_shapes,
    like,
    loaded_state,
    new_state,
)
from autohete.optim.updates import Beside, ReadUpdate

__all__ = ["CPUOptimizer", "ReadUpdate"]

_PLAIN = (torch.nn.Parameter, Tensor)  # what still moves wears another class
_HALF = (torch.bfloat16, torch.float16)


class CPUOptimizer(Optimizer):
    """Base of the optimizers for parameters on the CPU; a subclass adds its rule.

    All parameters are updated by one native call that releases the GIL. Results do not depend on
    the number of workers or on the instruction set, to the bit.

    bfloat16 and float16 parameters get fp32 state and an fp32 master, ``state[p]["master"]``; the
    parameter is always the master rounded to nearest even. Values that were edited since the last
    step (so that they are no longer the rounded master) are taken up into the master.

    Like torch's fused optimizers they understand GradScaler: the scale is divided out on the way
    and a step with infinities is skipped, counters included.
    """

    _step_supports_amp_scaling = True
    _num_workers: int | None = None
    _workers: _C.Workers | None = None  # made at the first step; not part of pickles and copies
    _kept_updates: Any | None = None  # of the last step; not part of them either
    _pools: StatePools | None = None  # of small states to come; not part of them
    _beside: Beside | None = None  # who makes the updates, if not step() itself; nor is this
    _moment_dtype = torch.float32
    _main_state = "exp_avg"  # where it is laid out as the parameter, the other states are too
    _needed: tuple[str, ...] = ()  # what a saved state must have that has anything
    _kept: tuple[str, ...] = ("_num_workers",)  # what pickles and copies carry besides torch's own

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        num_workers: int | None,
    ) -> None:
        for name in ("capturable", "differentiable"):
            if defaults.get(name):
                twin = type(self).__name__.removeprefix("CPU")
                raise ValueError(
                    f"{self._name}: {name} is True, expected False; use torch.optim.{twin}"
                )
        if num_workers is not None:
            num_workers = whole_number(self._name, "num_workers", num_workers)
            if num_workers < 1:
                raise ValueError(f"{self._name}: num_workers is {num_workers}, expected at least 1")
        self._check_group(defaults)
        super().__init__(params, defaults)
        self._num_workers = num_workers

    @property
    def _name(self) -> str:
        return type(self).__name__

    # ---------------------------------------------------------------- what a rule adds

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a number out of its range."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> Any:
        """Return the group's numbers as the kernel takes them."""
        raise NotImplementedError

    def _complete(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Make the state that is missing."""
        raise NotImplementedError

    def _native_update(
        self,
        hyper: Any,
        group: dict[str, Any],
        state: dict[str, Any],
        tensors: tuple[Tensor, Tensor, Tensor | None],
        index: int,
        after: list[Callable[[], Any]],
    ) -> tuple[Any, ...]:
        """Return the update as the native call takes it.

        Args:
            tensors: the gradient, the fp32 parameter or master, and the half parameter.
            index: of the parameter among all of them.
            after: what is to be done when the update has been made, to be added to.
        """
        raise NotImplementedError

    def _call(self, workers: _C.Workers, updates: list[Any]) -> None:
        raise NotImplementedError

    # What reads updates once, for many steps: a class of _C.
    _keep: Callable[..., Any]

    # ---------------------------------------------------------------- torch's interface

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its hyper-parameters and the dtypes of its parameters."""
        self._settle()
        super().add_param_group(param_group)
        self._pools = None
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for param in group["params"]:
                if param.requires_grad:  # a frozen one may be of any dtype
                    self._check_param(param)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of its torch.optim namesake.

        fp32 state stays fp32 to the bit. The tensors are copied: the state dict and this optimizer
        share no memory afterwards.

        Raises:
            ValueError: it is of other parameters or of another rule; nothing has been loaded.
        """
        if self._beside is not None:
            self._beside.wait()
        final: list[dict[str, Any]] = []

        def look(_: Optimizer, given: dict[str, Any]) -> None:  # behind the user's own hooks
            for name, param in self._places_in(given):
                saved = given["state"].get(name, {})
                check_kind(self._name, saved, self._needed)
                check_shapes(self._name, param, saved)
            final.append(given)

        hook = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        if self._beside is not None:
            self._beside.loaded()
        # torch has cast the state of half parameters down to their dtype; take it again.
        self._pools = None
        for name, param in self._places_in(final[0]):
            if name in final[0]["state"]:
                saved = final[0]["state"][name]
                self.state[param] = loaded_state(
                    param, saved, self._moment_dtype, self._the_pools()
                )

    def _places_in(self, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
        """Return each parameter behind the name that a state dict has for it, by order."""
        params = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        return list(zip(names, params, strict=False))  # torch refuses those of unequal length

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which step() returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0:
            return loss
        hypers = [self._hyper(group) for group in self.param_groups]
        if self._beside is not None:
            self._beside.take(hypers)
            return loss
        params = [param for group in self.param_groups for param in group["params"]]
        kept = self._kept_updates
        if kept is None or not kept.run(self._the_workers(), params, hypers, self.state):
            self._step_anew(params, hypers)
        return loss

    def _step_anew(self, params: list[Tensor], hypers: list[Any]) -> None:
        """Read every tensor, and keep what was read for the next step where it is all plain."""
        self._kept_updates = None
        updates = self.read_updates(hypers)
        plain = all(u.values is None or type(u.param) in _PLAIN for u in updates)
        if plain and not any(update.after for update in updates):
            values = [update.values for update in updates]
            kept = self._keep(params, [update.group for update in updates], values, self.state)
            if kept.run(self._the_workers(), params, hypers, self.state):
                self._kept_updates = kept
                return
        self.make_updates(updates)

    def read_updates(self, hypers: list[Any]) -> list[ReadUpdate]:
        """Return every parameter's update, in the order of the param groups.

        Raises:
            ValueError: something cannot be updated; nothing has been.
        """
        updates: list[ReadUpdate] = []
        for number, (group, hyper) in enumerate(zip(self.param_groups, hypers, strict=True)):
            for param in group["params"]:
                grad, values = param.grad, None
                after: list[Callable[[], Any]] = []
                if grad is not None:
                    values = self._update(param, grad, hyper, group, len(updates), after)
                updates.append(ReadUpdate(param, number, values, after))
        return updates

    def make_updates(self, updates: list[ReadUpdate]) -> None:
        """Make what read_updates() returned, or a part of it; releases the GIL."""
        made = [update.values for update in updates if update.values is not None]
        if made:
            self._call(self._the_workers(), made)
        for update in updates:
            for action in update.after:
                action()

    def _settle(self) -> None:
        if self._beside is not None:
            self._beside.synchronize()

    # ---------------------------------------------------------------- for the rules

    def _grad_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else inverse_scale(self._name, scale)

    def _the_workers(self) -> _C.Workers:
        if self._workers is None:
            self._workers = _C.Workers(self._num_workers or _C.default_num_workers())
        return self._workers

    def _the_pools(self) -> StatePools:
        if self._pools is None:
            self._pools = StatePools([p for group in self.param_groups for p in group["params"]])
        return self._pools

    def _new_state(
        self, key: str, param: Tensor, grad: Tensor, state: dict[str, Any], dtype: torch.dtype
    ) -> Tensor:
        """Return what is to be state[key], with undefined values."""
        return new_state(key, param, state, dtype, grad, self._the_pools())

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        hyper: Any,
        group: dict[str, Any],
        index: int,
        after: list[Callable[[], Any]],
    ) -> tuple[Any, ...]:
        """Return one parameter's update; of a sharded one, of what this rank has of it."""
        if is_sharded(param):
            part = PartOf(param, grad, self._name)
            update = self._update_with(
                part.state(self.state[param]),
                part.parameter,
                part.gradient,
                hyper,
                group,
                index,
                after,
            )
            self._show(part, param)
            if after:  # a rule may complete its state when the update has been made
                after.append(partial(self._show, part, param))
            return update
        return self._update_with(self.state[param], param, grad, hyper, group, index, after)

    def _update_with(
        self,
        state: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        hyper: Any,
        group: dict[str, Any],
        index: int,
        after: list[Callable[[], Any]],
    ) -> tuple[Any, ...]:
        """Odd layouts go through copies."""
        for tensor in (param, grad):
            if type(tensor) not in _PLAIN and tensor.layout == torch.strided:
                tensor.data_ptr()  # of a model wrapped with another optimizer: waits for it
        if grad.layout == torch.strided and grad.is_neg():
            grad = grad.resolve_neg()  # autograd leaves such for one value of a complex model
        half = param.dtype != torch.float32
        self._complete(param, grad, state, group)
        if half != ("master" in state):
            self._complete_master(param, grad, state)
        work: Tensor = param
        plain = param.is_contiguous()
        odd = not (plain and grad.is_contiguous())
        if odd and grad.layout == torch.strided:
            work = like(param, param)
            grad = like(grad, work)
            if work is not param:
                after.append(partial(param.copy_, work))
        if param.is_neg():
            work = param.detach().resolve_neg()
            after.append(partial(param.copy_, work))
        kept: Any = state.get(self._main_state, state.get("master"))
        alike = kept is None or (plain and kept.is_contiguous())
        if not alike and kept.stride() != work.stride():
            for key in FP32_KEYS:
                if isinstance(state.get(key), Tensor):
                    state[key] = like(state[key], work)
        tensors = (grad, state["master"] if half else work, work if half else None)
        update = self._native_update(hyper, group, state, tensors, index, after)
        if not state and param in self.state:
            after.append(partial(self._forget_empty, param))
        return update

    def _show(self, part: PartOf, param: Tensor) -> None:
        part.show(self.state[param])
        self._forget_empty(param)

    def _forget_empty(self, param: Tensor) -> None:
        # As torch, which makes none where the rule needs none.
        if param in self.state and not self.state[param]:
            del self.state[param]

    def _check_param(self, param: Tensor) -> None:
        if param.dtype != torch.float32 and param.dtype not in _HALF:
            raise ValueError(
                f"{self._name}: a parameter is {param.dtype}, expected float32, bfloat16 or float16"
            )

    def _complete_master(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        """Give a half parameter its master; take it from one that has become fp32 since."""
        if param.dtype == torch.float32:
            del state["master"]
        else:
            self._check_param(param)
            state["master"] = self._new_state("master", param, grad, state, torch.float32).copy_(
                param.detach()
            )
