"""The step of units whose optimizer state stays on the GPU: torch's own Adam rule, unit by unit.

Unit by unit, so that the temporaries of torch's foreach implementation are those of one unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from autohete import _C
from autohete.units import Unit

State = dict[str, Any]
Member = tuple[Tensor, State]
PartOf = Callable[[nn.Parameter, Tensor], Tensor]


@torch.no_grad()
def update_on_cuda(
    units: list[Unit],
    is_managed: Callable[[int], bool],
    states: dict[tuple[int, int], State],
    hypers: list[_C.AdamHyper],
    group_of: dict[int, int],
    part_of: PartOf | None = None,
) -> None:
    """Update every parameter that has a gradient, in the units that the engine does not update.

    Args:
        units: all units; is_managed says by index whether the engine updates it.
        states: step, exp_avg, exp_avg_sq and, where there is one, max_exp_avg_sq and master, by
            (unit, parameter). Steps are counted here.
        hypers: by param group, with the gradients' scale folded in.
        group_of: index of the param group by id of the parameter.
        part_of: gives the rows of a parameter, or of its gradient, that this rank updates.
    """
    for u, unit in enumerate(units):
        if is_managed(u):
            continue
        members: dict[int, list[Member]] = {}
        for i, parameter in enumerate(unit.parameters):
            if (u, i) in states and parameter.grad is not None:
                group = group_of[id(parameter)]
                value: Tensor = parameter
                if part_of is not None:
                    value = part_of(parameter, parameter.detach())
                    value.grad = part_of(parameter, parameter.grad)
                members.setdefault(group, []).append((value, states[u, i]))
        for group, pairs in members.items():
            update_group(pairs, hypers[group])


def update_group(pairs: list[Member], hyper: _C.AdamHyper) -> None:
    """Update parameters of one param group, each with its state, by torch's foreach rule in fp32.

    A half parameter's master is updated with the widened gradient and copied out. Where the
    parameter is not its master rounded, the user has edited it, and its own value is used.
    """
    half = [(p, s["master"]) for p, s in pairs if "master" in s]
    for parameter, master in half:
        edited = master.to(parameter.dtype) != parameter
        master.copy_(torch.where(edited, parameter.to(torch.float32), master))
    values = [s.get("master", p) for p, s in pairs]
    gradients: list[Tensor] = [p.grad.to(torch.float32) for p, _ in pairs]  # type: ignore[union-attr]
    if hyper.grad_scale != 1:
        gradients = list(torch._foreach_mul(gradients, hyper.grad_scale))
    states = [s for _, s in pairs]
    adam(
        values,
        gradients,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [s["max_exp_avg_sq"] for s in states] if hyper.amsgrad else [],
        [s["step"] for s in states],
        foreach=True,
        decoupled_weight_decay=hyper.decoupled_decay,
        amsgrad=hyper.amsgrad,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=hyper.maximize,
    )
    for parameter, master in half:
        parameter.copy_(master)
