"""Tied weights: the gradients of both uses are added in place, as they would be for equal tensors.

Autograd keeps the first use's gradient until the second one's is there, and adds the second to it
in place only if nobody else holds its memory. A linear layer's weight gradient comes as a view of a
transposed one, whose base still holds it; so a third tensor of that size is made for the sum, at
the very moment when the device holds most. Handing autograd the same bytes without the base lets it
add in place: the same sum, one tensor less.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autohete.units import Unit

_NODES = 8  # a linear layer's own graph has three or four


def shared_parameters(unit: Unit) -> frozenset[int]:
    """Return the ids of parameters that more than one of the unit's modules uses."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in unit.modules:
        own = {id(p) for p in module.parameters()}
        shared |= own & seen
        seen |= own
    return frozenset(shared)


def let_add_in_place(out: Tensor, shared: frozenset[int]) -> None:
    """Watch the last nodes of a module's graph for one that gives a shared parameter's gradient."""
    nodes: list[Any] = [out.grad_fn] if out.grad_fn is not None else []
    for node in nodes:
        for following, _ in node.next_functions:
            if following is None:
                continue
            if id(getattr(following, "variable", None)) in shared:
                node.register_hook(_without_base)
            elif len(nodes) < _NODES:
                nodes.append(following)


def _without_base(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
    return tuple(_alone(gradient) for gradient in gradients)


def _alone(gradient: Any) -> Any:
    if not isinstance(gradient, Tensor) or gradient.requires_grad or gradient.is_sparse:
        return gradient
    same = type(gradient) is Tensor or isinstance(gradient, nn.Parameter)
    return gradient.detach() if same and gradient._is_view() else gradient
