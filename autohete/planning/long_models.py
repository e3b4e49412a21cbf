"""Long models: the fake step runs on the first layers of a long list, the others are like those.

A thousand layers on fake tensors take a minute, and the last nine hundred of them say nothing new.
Of configurations only: what a live module does with its later layers is its author's to say, and
the longest published models have less than this module calls long.
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

LAYERS_RUN = 96
"""Of a list that is long: twice as many. Kinds of layers that alternate repeat in half as many."""


@contextmanager
def shortened(model: nn.Module, units: list[Unit], stay: int) -> Iterator[bool]:
    """Leave the first `stay` layers of the long list for a while; yields whether there is one.

    Where there are two, or its layers share parameters, the model stays whole.
    """
    lists = [module for module in model.modules() if _is_long(module)]
    if len(lists) != 1 or not _stand_alone(lists[0], units):
        yield False
        return
    children = lists[0]._modules
    lists[0]._modules = dict(list(children.items())[:stay])
    try:
        yield True
    finally:
        lists[0]._modules = children


def _is_long(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= 2 * LAYERS_RUN


def _stand_alone(layer_list: nn.Module, units: list[Unit]) -> bool:
    alone = {id(unit.modules[0]) for unit in units if unit.is_layer and len(unit.modules) == 1}
    return all(id(layer) in alone for layer in layer_list.children())


def agree(longer: list[UnitDescription], shorter: list[UnitDescription]) -> bool:
    """Whether more layers change nothing, neither in what is no layer nor in the layers."""
    rest = [[unit for unit in units if not unit.is_layer] for units in (longer, shorter)]
    layers, fewer = (
        [replace(unit, name="") for unit in units if unit.is_layer] for units in (longer, shorter)
    )
    begin, period = LAYERS_RUN // 4, LAYERS_RUN // 2
    middle = layers[begin : period - 1]
    again = layers[begin + period : 2 * period - 1]
    return rest[0] == rest[1] and middle == again == fewer[begin : period - 1]


def lengthened(units: list[Unit], described: list[UnitDescription]) -> list[UnitDescription] | None:
    """Describe all units: a layer that was left out as the one at its place in the middle half.

    None where the two are not of one kind. The first and the last layers that ran may have been
    booked with work of their neighbours.
    """
    own = {description.name: description for description in described}
    ran = [description for description in described if description.is_layer]
    kinds = [unit.kind for unit in units if unit.is_layer]
    begin, period = LAYERS_RUN // 4, LAYERS_RUN // 2
    everything, number = [], 0
    for unit in units:
        description = own.get(unit.name)
        if description is None:
            like = begin + (number - begin) % period
            if kinds[like] != unit.kind:
                return None
            description = replace(ran[like], name=unit.name)
        everything.append(description)
        number += unit.is_layer
    return everything
