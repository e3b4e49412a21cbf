"""CPUSGD: torch.optim.SGD's rule, one pass over memory on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from autohete import _C
from autohete.optim.base import CPUOptimizer
from autohete.optim.checks import check_not_negative

__all__ = ["CPUSGD"]


class CPUSGD(CPUOptimizer):
    """Implement SGD with momentum for parameters on the CPU.

    Arguments, param_groups and state_dict are torch.optim.SGD's, and state dicts go both ways.
    Half parameters, GradScaler, layouts and workers are handled as in CPUAdamW.

    Args:
        params: parameters or groups of them: float32, bfloat16 or float16, dense, on the CPU.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        foreach, fused: kept in param_groups for state dicts; there is one implementation.
        differentiable: must be False.
        num_workers: threads, the calling one included; default: the CPUs this rank may use.

    Raises:
        ValueError: as in CPUAdamW.
    """

    _main_state = "momentum_buffer"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        num_workers: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, num_workers=num_workers)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_not_negative(self._name, group, ("lr", "momentum", "weight_decay"))
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"{self._name}: nesterov is True with momentum {momentum} and dampening "
                f"{dampening}, expected a momentum and no dampening"
            )

    def _hyper(self, group: dict[str, Any]) -> _C.SgdHyper:
        self._check_group(group)
        return _C.SgdHyper(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            grad_scale=self._grad_scale(),
        )

    def _complete(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        pass  # no buffer means "the first step": it is made in the update and kept after it

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
        if group["momentum"] == 0:
            return (hyper, True, grad, param, None, half)
        buffer = state.get("momentum_buffer")
        first = buffer is None
        if buffer is None:
            near = dict(state, half=half)
            buffer = self._new_state("momentum_buffer", param, grad, near, param.dtype)
            after.append(partial(state.__setitem__, "momentum_buffer", buffer))
        return (hyper, first, grad, param, buffer, half)

    def _call(self, workers: _C.Workers, updates: list[Any]) -> None:
        _C.sgd_(workers, updates, by_products=False)

    _keep = _C.KeptSgd
