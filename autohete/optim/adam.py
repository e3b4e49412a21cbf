"""CPUAdamW and CPUAdam: torch.optim's rules, one pass over memory on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from autohete import _C
from autohete.optim.base import CPUOptimizer
from autohete.optim.checks import (
    check_betas,
    check_not_negative,
    inverse_scale,
    two_betas,
    whole_number,
)

__all__ = ["CPUAdam", "CPUAdamW", "hyper_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class CPUAdamW(CPUOptimizer):
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
        moment_dtype: torch.bfloat16 halves the memory of both moments. They are rounded at random,
            so that they are right on average; the numbers are not those of fp32 moments any more.
        seed: of that rounding. The same seed gives the same bits, with any number of workers.

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

    _seed = 0
    _needed = ("exp_avg", "exp_avg_sq")
    _kept = ("_num_workers", "_moment_dtype", "_seed")

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
        moment_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{self._name}: moment_dtype is {moment_dtype}, expected float32 or bfloat16"
            )
        self._moment_dtype = moment_dtype
        self._seed = whole_number(self._name, "seed", seed)
        defaults = {
            "lr": lr,
            "betas": two_betas(self._name, betas),
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
        super().__init__(params, defaults, num_workers=num_workers)

    @property
    def moment_dtype(self) -> torch.dtype:
        """Dtype of both moments."""
        return self._moment_dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # The optimizer's own choice, as torch.optim.AdamW keeps its own through loading.
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_numbers(group)
        if group["amsgrad"] and self._moment_dtype != torch.float32:
            raise ValueError(
                f"{self._name}: amsgrad is True with bfloat16 moments, expected False; a maximum "
                "of randomly rounded values would only grow"
            )

    def _hyper(self, group: dict[str, Any]) -> _C.AdamHyper:
        self._check_group(group)
        return hyper_of(group, self, decoupled=group["decoupled_weight_decay"])

    def _complete(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        amsgrad = group["amsgrad"]
        made = (
            isinstance(state.get("step"), Tensor) and "exp_avg" in state and "exp_avg_sq" in state
        )
        if made and (not amsgrad or "max_exp_avg_sq" in state):
            return
        self._check_param(param)
        if not isinstance(state.get("step"), Tensor):  # a number would not be counted on
            step = float(state.get("step", 0.0))
            state["step"] = torch.tensor(step, dtype=torch.float32, device="cpu")
        for key in _MOMENTS if amsgrad else _MOMENTS[:2]:
            if key not in state:
                state[key] = self._new_state(key, param, grad, state, self._moment_dtype).zero_()

    def _native_update(
        self,
        hyper: Any,
        group: dict[str, Any],
        state: dict[str, Any],
        tensors: tuple[Tensor, Tensor, Tensor | None],
        index: int,
        after: list[Callable[[], Any]],
    ) -> tuple[Any, ...]:
        grad, param, half = tensors
        largest = state["max_exp_avg_sq"] if group["amsgrad"] else None
        moments = (state["exp_avg"], state["exp_avg_sq"], largest)
        update = (hyper, state["step"], grad, param, *moments, half)
        if self._moment_dtype == torch.float32:
            return update
        # One seed for each parameter, far apart for neighbouring seeds of the user's.
        return (*update, ((self._seed * 0x9E3779B97F4A7C15 + index) % 2**64, 0))

    def _call(self, workers: _C.Workers, updates: list[Any]) -> None:
        _C.adamw_(workers, updates, by_products=False)

    _keep = _C.KeptAdamW


class CPUAdam(CPUAdamW):
    """Implement Adam for parameters on the CPU: CPUAdamW with torch.optim.Adam's defaults.

    The decay is added to the gradient (L2), and is 0 by default.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=decoupled_weight_decay,
            **others,
        )


def hyper_of(
    group: dict[str, Any], optimizer: Optimizer, *, decoupled: bool, grad_scale: float = 1.0
) -> _C.AdamHyper:
    """Return a param group's numbers as the kernel takes them, the scaler's among them.

    Args:
        grad_scale: what gradients are multiplied by where the scaler has left no word.

    Raises:
        ValueError: one is out of its range (a scheduler may have set it).
    """
    _check_numbers(group)
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
        grad_scale=grad_scale if scale is None else inverse_scale("AdamW", scale),
    )


def _check_numbers(group: dict[str, Any]) -> None:
    check_not_negative("AdamW", group, ("lr", "eps", "weight_decay"))
    check_betas("AdamW", group)
