"""CPULion: Lion's rule, one pass over memory on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from autohete import _C
from autohete.optim.base import CPUOptimizer
from autohete.optim.checks import check_betas, check_not_negative, two_betas

__all__ = ["CPULion"]


class CPULion(CPUOptimizer):
    """Implement Lion (Chen et al., arXiv 2302.06675) for parameters on the CPU.

    The step is lr for every weight, by the sign of an interpolation of momentum and gradient: a
    learning rate of a third to a tenth of AdamW's and a decay as much larger are usual. The only
    state is ``exp_avg``. Half parameters, GradScaler, layouts and workers are handled as in
    CPUAdamW.

    Args:
        params: parameters or groups of them: float32, bfloat16 or float16, dense, on the CPU.
        lr: learning rate; a one-element tensor works too.
        betas: of the interpolation, and of the momentum.
        weight_decay: decoupled, times lr.
        maximize: go up instead of down.
        num_workers: threads, the calling one included; default: the CPUs this rank may use.

    Raises:
        ValueError: as in CPUAdamW.
    """

    _needed = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        num_workers: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": two_betas(self._name, betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
            "differentiable": False,  # torch's own loading adds it
        }
        super().__init__(params, defaults, num_workers=num_workers)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_not_negative(self._name, group, ("lr", "weight_decay"))
        check_betas(self._name, group)

    def _hyper(self, group: dict[str, Any]) -> _C.LionHyper:
        self._check_group(group)
        return _C.LionHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            grad_scale=self._grad_scale(),
        )

    def _complete(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "exp_avg" not in state:
            self._check_param(param)
            state["exp_avg"] = self._new_state("exp_avg", param, grad, state, torch.float32).zero_()

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
        return (hyper, 1.0, grad, param, state["exp_avg"], half)  # no step number in the rule

    def _call(self, workers: _C.Workers, updates: list[Any]) -> None:
        _C.lion_(workers, updates, by_products=False)

    _keep = _C.KeptLion
