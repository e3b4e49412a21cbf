"""CPUAdamW: torch.optim.AdamW's rule, one pass over memory on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from autohete import _C

__all__ = ["CPUAdamW"]

_HALF = (torch.bfloat16, torch.float16)
_FP32_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


class CPUAdamW(Optimizer):
    """Implement AdamW (or Adam) for parameters on the CPU.

    Arguments, param_groups and state_dict are torch.optim.AdamW's, and state dicts go both ways.
    All parameters are updated by one native call that releases the GIL. Results do not depend on
    the number of workers or on the instruction set, to the bit.

    bfloat16 and float16 parameters get fp32 moments and an fp32 master, ``state[p]["master"]``; the
    parameter is always the master rounded to nearest even. Values that were edited since the last
    step (so that they are no longer the rounded master) are taken up into the master.

    Like torch's fused optimizers it understands GradScaler: the scale is divided out on the way and
    a step with infinities is skipped, counters included.

    Args:
        params: parameters or groups of them: float32, bfloat16 or float16, dense, on the CPU.
        lr: learning rate; a one-element tensor works too.
        betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, fused: kept in param_groups for state dicts; there is one implementation.
        capturable, differentiable: must be False.
        decoupled_weight_decay: False adds the decay to the gradient, as torch.optim.Adam does.
        num_workers: threads, the calling one included; default: the CPUs this rank may use.

    Raises:
        ValueError: for a hyper-parameter out of its range, and in step() for a parameter or
            gradient that is sparse, of another dtype, or not on the CPU.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = CPUAdamW([weight], lr=0.1, weight_decay=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000, 0.9000])
    """

    _step_supports_amp_scaling = True
    _num_workers: int | None = None
    _workers: _C.Workers | None = None  # made at the first step; not part of pickles and copies

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        num_workers: int | None = None,
    ) -> None:
        for name, asked in (("capturable", capturable), ("differentiable", differentiable)):
            if asked:
                raise ValueError(f"CPUAdamW: {name} is True, expected False; use torch.optim.AdamW")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"CPUAdamW: num_workers is {num_workers}, expected at least 1")
        defaults = {
            "lr": lr,
            "betas": tuple(_number("betas", beta) for beta in betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        _check_hyper_parameters(defaults)
        super().__init__(params, defaults)
        self._num_workers = num_workers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its hyper-parameters and the dtypes of its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_hyper_parameters(group)
            for param in filter(_is_trained, group["params"]):
                _check_param(param)
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name in ("foreach", "fused"):
                group.setdefault(name, None)
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                group.setdefault(name, False)
            # The optimizer's own choice, as torch.optim.AdamW keeps its own through loading.
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW.

        fp32 state stays fp32 to the bit. The tensors are copied: the state dict and this optimizer
        share no memory afterwards.
        """
        final: list[dict[str, Any]] = []
        hook = self.register_load_state_dict_pre_hook(lambda _, given: final.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch has cast the state of half parameters down to their dtype; take it again.
        params = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in final[0]["param_groups"] for name in group["params"]]
        for name, param in zip(names, params, strict=True):
            if name in final[0]["state"]:
                self.state[param] = loaded_state(param, final[0]["state"][name])

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
        updates: list[tuple[Any, ...]] = []
        copy_back: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            hyper = hyper_of(group, self, decoupled=group["decoupled_weight_decay"])
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    update = self._update(param, grad, hyper, group["amsgrad"], copy_back)
                    updates.append(update)
        if updates:
            _C.adamw_(self._the_workers(), updates)
        for param, updated in copy_back:
            param.copy_(updated)
        return loss

    def _the_workers(self) -> _C.Workers:
        if self._workers is None:
            self._workers = _C.Workers(self._num_workers or _C.default_num_workers())
        return self._workers

    def _update(
        self,
        param: Tensor,
        grad: Tensor,
        hyper: _C.AdamHyper,
        amsgrad: bool,
        copy_back: list[tuple[Tensor, Tensor]],
    ) -> tuple[Any, ...]:
        """Return the update as the native call takes it; odd layouts go through copies."""
        state = self.state[param]
        half = param.dtype != torch.float32
        if "step" not in state or (amsgrad and "max_exp_avg_sq" not in state):
            _complete_state(param, state, amsgrad)
        if half != ("master" in state):
            _complete_master(param, state)
        work = param
        odd = not (param.is_contiguous() and grad.is_contiguous())
        if odd and grad.layout == torch.strided:
            work = _like(param, param)
            grad = _like(grad, work)
            if work is not param:
                copy_back.append((param, work))
        if state["exp_avg"].stride() != work.stride():
            for key in _FP32_KEYS:
                if key in state:
                    state[key] = _like(state[key], work)
        return (
            hyper,
            state["step"],
            grad,
            state["master"] if half else work,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["max_exp_avg_sq"] if amsgrad else None,
            work if half else None,
        )


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"CPUAdamW: {name} has {value.numel()} elements, expected one")
    return float(value)


def hyper_of(group: dict[str, Any], optimizer: Optimizer, *, decoupled: bool) -> _C.AdamHyper:
    """Return a param group's numbers as the kernel takes them, the scaler's among them.

    Raises:
        ValueError: one is out of its range (a scheduler may have set it).
    """
    _check_hyper_parameters(group)
    scale = getattr(optimizer, "grad_scale", None)
    return _C.AdamHyper(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled_decay=decoupled,
        maximize=bool(group["maximize"]),
        amsgrad=bool(group["amsgrad"]),
        grad_scale=1.0 if scale is None else 1.0 / float(scale),
    )


def _check_hyper_parameters(group: dict[str, Any]) -> None:
    numbers = {"lr": group["lr"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    for name, given in numbers.items():
        value = _number(name, given)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"AdamW: {name} is {value}, expected a finite number >= 0")
    for i, beta in enumerate(group["betas"]):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"AdamW: betas[{i}] is {float(beta)}, expected 0 <= beta < 1")


def _is_trained(param: Tensor) -> bool:
    return param.requires_grad


def _check_param(param: Tensor) -> None:
    if param.dtype != torch.float32 and param.dtype not in _HALF:
        raise ValueError(
            f"CPUAdamW: a parameter is {param.dtype}, expected float32, bfloat16 or float16"
        )


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return `tensor` laid out as a dense `model` is; itself when it already is."""
    dense = torch.empty_like(model, dtype=tensor.dtype, memory_format=torch.preserve_format)
    return tensor if tensor.stride() == dense.stride() else dense.copy_(tensor)


def _complete_state(param: Tensor, state: dict[str, Any], amsgrad: bool) -> None:
    _check_param(param)
    state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        if key not in state and (amsgrad or key != "max_exp_avg_sq"):
            state[key] = torch.zeros_like(
                param, dtype=torch.float32, memory_format=torch.preserve_format
            )


def _complete_master(param: Tensor, state: dict[str, Any]) -> None:
    """Give a half parameter its master; take it from one that has become fp32 since."""
    if param.dtype == torch.float32:
        del state["master"]
    else:
        _check_param(param)
        state["master"] = param.detach().to(torch.float32, memory_format=torch.preserve_format)


def loaded_state(param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of one parameter's state of a state dict, fp32 where it was fp32."""
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key == "step":
            state[key] = _loaded_step(value)
        elif key in _FP32_KEYS and isinstance(value, Tensor):
            state[key] = torch.empty_like(
                param, dtype=torch.float32, device="cpu", memory_format=torch.preserve_format
            ).copy_(value.detach())
        else:
            state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def _loaded_step(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    # A float32 counts to 2^24.
    return torch.tensor(float(value), dtype=torch.float32 if value < 2**24 else torch.float64)
