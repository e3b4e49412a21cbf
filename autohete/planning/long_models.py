"""Long models: the fake step runs on the first layers of a long list, the others are like those.

A thousand layers on fake tensors take a minute, and the last 976 of them say nothing new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from autohete.units import Unit

if TYPE_CHECKING:
    from autohete.planning.model_profile import UnitDescription

LAYERS_RUN = 24
"""More than the longest period of unlike layers that is published (8 in Jamba, 6 in Gemma 3)."""


@contextmanager
def shortened(model: nn.Module, units: list[Unit], layers_run: int) -> Iterator[list[Unit]]:
    """Take the later layers of long lists out for a while; yields the units that are left.

    The first two of each kind of layer stay, with all before them, and `layers_run` more. A list is
    long from twice `LAYERS_RUN` on; one that shares parameters with others stays whole, and so do
    two long lists (what they hand to each other, an encoder's output, grows with both).
    """
    lists = [module for module in model.modules() if _is_long(module)]
    stay = _stays(lists[0], units, layers_run) if len(lists) == 1 else 0
    if not stay:
        yield units
        return
    module = lists[0]
    children = module._modules
    taken = {id(child) for child in list(children.values())[stay:]}
    module._modules = dict(list(children.items())[:stay])
    try:
        yield [unit for unit in units if id(unit.modules[0]) not in taken]
    finally:
        module._modules = children


def _is_long(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= 2 * LAYERS_RUN


def _stays(layer_list: nn.Module, units: list[Unit], layers_run: int) -> int:
    """How many of its layers stay; 0: all of them."""
    unit_of = {id(unit.modules[0]): unit for unit in units if _stands_alone(unit)}
    layers = [unit_of.get(id(child)) for child in layer_list.children()]
    if None in layers:
        return 0
    stay = layers_run + _second_of_each_kind([unit for unit in layers if unit is not None])
    return stay if stay < len(layers) else 0


def _stands_alone(unit: Unit) -> bool:
    return unit.is_layer and len(unit.modules) == 1


def _second_of_each_kind(layers: list[Unit]) -> int:
    """How many of the first layers hold two of each kind, or the one that there is."""
    seen: dict[str, int] = {}
    last = 0
    for count, unit in enumerate(layers, start=1):
        seen[unit.kind] = seen.get(unit.kind, 0) + 1
        if seen[unit.kind] <= 2:
            last = count
    return last


def lengthened(units: list[Unit], described: list[UnitDescription]) -> list[UnitDescription]:
    """Describe all units: those taken out as the middle one that ran of their kind.

    The first and the last may have been booked with work of their neighbours.
    """
    own = {description.name: description for description in described}
    ran: dict[str, list[UnitDescription]] = {}
    for unit in units:
        if unit.name in own:
            ran.setdefault(unit.kind, []).append(own[unit.name])
    middle = {kind: some[len(some) // 2] for kind, some in ran.items()}
    return [own.get(unit.name) or replace(middle[unit.kind], name=unit.name) for unit in units]
