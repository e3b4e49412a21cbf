"""What is checked and decided before anything is attached: pairs, dtypes, budgets, first plan."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autohete import _C
from autohete.config import PRECISIONS, Config
from autohete.guard import Guard
from autohete.hooks import HookedForward
from autohete.optim.sharded import is_sharded
from autohete.planning import InfeasibleError, format_bytes
from autohete.units import Unit

if TYPE_CHECKING:
    from autohete.stepping import OptimizerBridge


def _pages(num_bytes: int) -> int:
    """A host block takes whole pages, at least one."""
    return max(-(-num_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def check_types(model: object, optimizer: object) -> None:
    """Raise ValueError unless these are a module and an optimizer."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )


def check_pair(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError unless the optimizer's parameters are the model's and nothing is wrapped.

    A wrapper that the user has let go of without unwrap() gives the model back first.
    """
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, HookedForward) and forward.run is not None:
            forward.run.leave_if_dropped()
    if any(isinstance(vars(m).get("forward"), HookedForward) for m in model.modules()):
        raise ValueError(
            f"model: this {type(model).__name__} is wrapped already, expected a plain module; "
            "call unwrap() on the first wrapper before wrapping again"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Guard):
            raise ValueError(
                f"model: parameter {name} belongs to another wrapped model, expected one wrapper "
                "for each parameter; wrap one module that contains both models"
            )
    _check_sharded(model)
    _check_aliases(model)
    _check_views(model)
    _check_layers(model, optimizer)
    known = {id(p) for p in model.parameters()}
    foreign = [
        tuple(p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in known
    ]
    if foreign:
        raise ValueError(
            f"optimizer: {len(foreign)} of its parameters (first of shape {foreign[0]}) are not "
            f"parameters of this {type(model).__name__}; build the optimizer from "
            "model.parameters() of the model that is wrapped"
        )


def _check_sharded(model: nn.Module) -> None:
    """fully_shard moves and gathers parameters itself."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"model: parameter {name} is a DTensor (fully_shard or tensor parallel), expected "
                "a plain one; train the sharded model without the wrapper, with "
                "offload_policy=CPUOffloadPolicy() and autohete.CPUAdamW, or wrap it unsharded"
            )


def _check_aliases(model: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or parameter.numel() == 0 or parameter.layout != torch.strided:
            continue
        other = names.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise ValueError(
                f"model: parameters {other} and {name} share memory, expected memory of their own; "
                "tie weights by using one Parameter in both places"
            )


def _check_views(model: nn.Module) -> None:
    """Parameters get memory of their own, so a larger tensor they are part of would not follow."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    plain = [(n, t) for n, t in tensors if t.layout == torch.strided and not t.is_meta]
    name = held_elsewhere(plain)
    if name is not None:
        raise ValueError(
            f"model: parameter {name} is part of a larger tensor that is held elsewhere, expected "
            "memory of its own; the larger one would not follow any more: give the parameter a "
            "clone, or drop the larger tensor"
        )


def check_gradients(engine: _C.Engine, units: list[Unit]) -> None:
    """Gradients leave one by one, so a flat buffer that they are part of would not follow."""
    parts = engine.gradient_parts()
    if not parts:
        return
    name = held_elsewhere([(units[u].name, gradient) for u, gradient in parts])
    if name is not None:
        raise ValueError(
            f"autohete: a gradient of unit {name} is part of a larger tensor that is held "
            "elsewhere, expected memory of its own; keep no flat buffer over p.grad, which each "
            "step reads and frees by itself"
        )


def held_elsewhere(tensors: list[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first that is part of a larger tensor somebody else holds, if any."""
    holders: dict[int, set[int]] = {}
    for _, tensor in tensors:
        holder = holders.setdefault(tensor.untyped_storage()._cdata, set())
        holder.add(tensor._cdata)
        if tensor._base is not None:
            holder.add(tensor._base._cdata)  # a view keeps its base alive by itself
    for name, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() <= tensor.nbytes:
            continue
        ours = len(holders[storage._cdata]) + 1  # the object `storage` holds it too
        if torch._C._storage_Use_Count(storage._cdata) > ours or _base_is_held(tensor):
            return name
    return None


def _base_is_held(view: Tensor) -> bool:
    return view._base is not None and _references(view) > _references(torch.zeros(2)[:1])


def _references(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base)


def _check_layers(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError for layers whose gradients are sparse."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
            continue
        if module.weight.requires_grad and id(module.weight) in stepped:
            raise ValueError(
                f"model: {name} has sparse=True, expected dense gradients; set sparse=False on "
                "it, or freeze it"
            )


def safest_plan(units: list[Unit], native: bool) -> list[_C.UnitPlan]:
    """The plan that needs least device memory: all on the host, all layers recomputed."""
    plans = []
    for unit in units:
        plan = _C.UnitPlan()
        plan.parameters = _C.Tier.DEVICE if unit.is_container else _C.Tier.HOST
        plan.gradients = _C.Tier.HOST
        plan.optimizer_state = _C.Tier.HOST
        plan.activations = _C.ActivationRule.RECOMPUTE if unit.is_layer else _C.ActivationRule.KEEP
        plans.append(plan)
    return plans


def check_budgets(
    units: list[Unit], bridge: OptimizerBridge, config: Config, gpu_mem: int, cpu_mem: int
) -> bool:
    """Raise InfeasibleError when the budgets cannot hold even the safest plan.

    What activations need is not known before the first step; the rest is.
    """
    half = config.precision in ("bf16", "fp16")
    device, gradients, host = 0, 0, 0
    offloaded: list[int] = []
    for unit in units:
        sizes = []
        for p in unit.parameters:
            item = 2 if half and p.is_floating_point() else p.element_size()
            sizes.append((p.numel() * item, p.numel(), bridge.updates(p)))
        params, grads, state = _C.block_bytes(sizes, bridge.native, bridge.amsgrad)
        host += _pages(params) + _pages(grads) + (_pages(state) if state else 0)
        if unit.is_container:
            device += params
        else:
            offloaded.append(params)
        gradients = max(gradients, grads)
    slots = sum(sorted(offloaded, reverse=True)[: config.window])
    needed = device + slots + gradients
    if needed > gpu_mem:
        raise InfeasibleError(
            f"gpu_mem is {format_bytes(gpu_mem)}, expected at least {format_bytes(needed)} "
            f"(gpu_mem={needed}) for {config.window} slots as large as the largest units and "
            "the largest gradients, activations not counted; give more, or name smaller layers "
            "with layers="
        )
    if host > cpu_mem:
        raise InfeasibleError(
            f"cpu_mem is {format_bytes(cpu_mem)}, expected at least {format_bytes(host)} "
            f"(cpu_mem={host}) for parameters, gradients and optimizer state; give more memory or "
            "train a smaller model"
        )
    return half


def convert(unit: Unit, precision: str | None) -> list[Tensor | None]:
    """Bring the unit's parameters to the asked precision; return the fp32 masters kept aside.

    Raises:
        ValueError: "fp32" was asked for and a parameter is half.
    """
    leave_meta(unit)
    masters: list[Tensor | None] = []
    for parameter in unit.parameters:
        masters.append(None)
        if precision is None or not parameter.is_floating_point():
            continue
        wanted = PRECISIONS[precision]
        if precision == "fp32" and parameter.dtype != wanted:
            raise ValueError(
                f'precision is "fp32", but a parameter of unit {unit.name} is {parameter.dtype}; '
                "call model.float() first or leave precision out"
            )
        if parameter.dtype == torch.float32 and wanted != torch.float32:
            masters[-1] = parameter.data
            parameter.data = parameter.data.to(wanted)
    return masters


def host_ranges(unit: Unit) -> list[tuple[int, int]]:
    """Return where in host memory the unit's tensors lie, as [begin, end) addresses."""
    return [
        (p.data_ptr(), p.data_ptr() + p.nbytes)
        for p in unit.parameters
        if p.device.type == "cpu" and p.layout == torch.strided and p.is_contiguous()
    ]


def leave_meta(unit: Unit) -> None:
    """Give the unit's meta tensors memory, and the values their modules' reset_parameters gives.

    Raises:
        ValueError: a module has meta tensors of its own and no reset_parameters.
    """
    inside = {
        id(module): module
        for root in unit.modules
        for module in (root.modules() if unit.is_layer else [root])
    }
    for module in inside.values():
        own = [p for p in module.parameters(recurse=False) if p.is_meta]
        buffers = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        if not own and not buffers:
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"model: {type(module).__name__} in unit {unit.name} has tensors on the meta "
                "device and no reset_parameters(), expected a way to give them values; load the "
                "weights (to_empty and load_state_dict) before wrapping"
            )
        for parameter in own:
            _materialize(parameter)
        for name in buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        module.reset_parameters()  # type: ignore[operator]


def _materialize(parameter: nn.Parameter) -> None:
    """Give a meta parameter memory; its identity stays, so optimizer and ties stay right."""
    real = nn.Parameter(
        torch.zeros_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
    )
    torch.utils.swap_tensors(parameter, real)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of all modules; parameters stay."""
    moved: dict[int, Tensor] = {}  # one that two modules share stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = (
                    torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                )
            module._buffers[name] = moved[id(buffer)]
