"""Which modules move together: one unit per transformer layer, and units for what is left over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Layers = (
    None
    | str
    | type[nn.Module]
    | Sequence[nn.Module | str | type[nn.Module]]
    | Callable[[nn.Module], bool]
)

Buffer = tuple[nn.Module, str]
"""A module and the name of its buffer."""


@dataclass
class Unit:
    """Modules whose parameters are planned and moved together.

    A parameter belongs to exactly one unit; modules that share one (tied weights) are one unit.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)
    is_layer: bool = False
    is_container: bool = False
    """It contains other units, so its parameters stay on the device."""
    edits_inputs: bool | None = None
    """Whether its forward writes to its own inputs; None until it has run."""
    written_buffers: list[Buffer] | None = None
    """Buffers its forward writes to; None until it has run."""
    num_compared: int = 0
    """Recomputations whose output was compared with the first run's."""
    _places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] | None = None

    @property
    def kind(self) -> str:
        """Equal for units of equal modules with equal shapes."""
        shapes = ",".join(f"{tuple(p.shape)}{p.dtype}{p.requires_grad}" for p in self.parameters)
        return "+".join(type(m).__name__ for m in self.modules) + f"[{shapes}]"

    def has_its_parameters(self) -> bool:
        """Whether its modules hold the parameters they held when first asked.

        functional_call and parametrizations exchange them, for a while or for good.
        """
        if self._places is None:
            self._places = [
                (module._parameters, name, parameter)
                for root in self.modules
                for module in (root.modules() if self.is_layer else [root])
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        return all(owner.get(name) is parameter for owner, name, parameter in self._places)


def find_units(model: nn.Module, layers: Layers = None) -> list[Unit]:
    """Return the units of `model` in the order its modules are registered.

    Args:
        model: any module; its parameters are all covered.
        layers: what counts as one layer: a class, its name, a list of those or of the modules
            themselves, or a predicate. Left out: the elements of each outermost ModuleList or
            Sequential of two or more equal modules; where there is none, every module that owns
            parameters is a unit.

    Raises:
        ValueError: `layers` matches nothing, or nested modules.
    """
    found = _find_layers(model, layers)
    names = {id(module): name for name, module in model.named_modules()}
    owner: dict[int, Unit] = {}
    units: list[Unit] = []
    inside: set[int] = set()
    layer_ids = {id(layer) for layer in found}
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if id(module) in layer_ids:
            inside.update(id(m) for m in module.modules())
            own = list(module.parameters())
            unit = Unit(name, [module], is_layer=True)
        else:
            own = list(module.parameters(recurse=False))
            unit = Unit(name or "(root)", [module])
            unit.is_container = any(id(m) in names for m in module.children())
        _place(unit, own, owner, units)
    return [unit for unit in units if unit.parameters]


def _place(unit: Unit, own: list[nn.Parameter], owner: dict[int, Unit], units: list[Unit]) -> None:
    """Add the unit, or merge it into the one that already has one of its parameters."""
    shared = next((owner[id(p)] for p in own if id(p) in owner), None)
    target = shared or unit
    if shared is None:
        if own:
            units.append(unit)
    else:
        shared.modules += unit.modules
        shared.is_container |= unit.is_container
        shared.is_layer &= unit.is_layer
    for parameter in own:
        if id(parameter) not in owner:
            owner[id(parameter)] = target
            target.parameters.append(parameter)


def _find_layers(model: nn.Module, layers: Layers) -> list[nn.Module]:
    if layers is None:
        return _repeated_layers(model)
    found = _named(model, layers)
    if not found:
        raise ValueError(
            f"layers: {layers!r} matches no module of {type(model).__name__}, expected at least "
            "one; give the class of the transformer block, or leave it out"
        )
    nested = {id(inner) for m in found for inner in m.modules() if inner is not m}
    if any(id(m) in nested for m in found):
        raise ValueError(
            f"layers: {layers!r} matches modules inside each other, expected one level; name the "
            "outer class"
        )
    return found


def _named(model: nn.Module, layers: Any) -> list[nn.Module]:
    """Return the modules that one entry means: in the model's order, listed ones in the list's."""
    if isinstance(layers, str):
        return [m for m in model.modules() if type(m).__name__ == layers]
    if isinstance(layers, type):
        return [m for m in model.modules() if isinstance(m, layers)]
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.ModuleList):
        return [layers]
    if callable(layers) and not isinstance(layers, nn.Module):
        return [m for m in model.modules() if layers(m)]
    if isinstance(layers, Iterable):
        each = list(layers)
        if all(isinstance(entry, (str, type, nn.Module)) for entry in each):
            return list(dict.fromkeys(m for entry in each for m in _named(model, entry)))
    raise ValueError(
        f"layers is {layers!r}, expected a class or its name, a list of those or of modules, or a "
        "function of a module"
    )


def _repeated_layers(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        elements = [m for m in module if any(True for _ in m.parameters())]
        if len(elements) < 2 or len({type(m) for m in elements}) != 1:
            continue
        for element in elements:
            found.append(element)
            inside.update(id(m) for m in element.modules())
    return found


def tensors_in(value: object, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, dicts and objects such as model outputs."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, bool)):
        return []
    if isinstance(value, dict):
        items: list[object] = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        items = list(vars(value).values())
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]
