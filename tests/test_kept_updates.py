"""From the second step on an optimizer makes the updates it has read before.

The oracle is the same optimizer that reads everything anew at every step. Whatever a user changes
between two steps, both must agree to the bit, counters included.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autohete.optim import CPUSGD, CPUAdam, CPUAdamW, CPULion, CPUOptimizer

Change = Callable[[CPUOptimizer, list[nn.Parameter]], Any]
SHAPES = [(33, 7), (5,), (2, 3, 4), (64, 65)]
MAKERS: dict[str, Callable[[Any], CPUOptimizer]] = {
    "adamw": CPUAdamW,
    "amsgrad": lambda params: CPUAdamW(params, amsgrad=True),
    "bf16 moments": lambda params: CPUAdamW(params, moment_dtype=torch.bfloat16),
    "adam": CPUAdam,
    "sgd": lambda params: CPUSGD(params, lr=0.1, momentum=0.9),
    "plain sgd": lambda params: CPUSGD(params, lr=0.1),
    "lion": CPULion,
}


def model(dtype: torch.dtype) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


def give_grads(params: list[nn.Parameter], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)


def main_state(optimizer: CPUOptimizer, param: nn.Parameter) -> dict[str, Any]:
    return optimizer.state[param]


def replace_state(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    for key, value in list(main_state(optimizer, params[0]).items()):
        main_state(optimizer, params[0])[key] = value * 2 if value.numel() > 1 else value + 3


def move_state(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    for value in main_state(optimizer, params[2]).values():
        value.data = value.data.clone()


def set_state_aside(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_state(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def forget_one(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.state.pop(params[1], None)


def transpose(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    params[3].data = params[3].data.t().contiguous().t()


def negated_gradient(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    grad = params[3].grad
    assert grad is not None
    params[3].grad = torch._neg_view(grad)


def turned_gradient(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    grad = params[3].grad
    assert grad is not None
    params[3].grad = grad.t().contiguous().t()


def add_group(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    more = nn.Parameter(torch.linspace(-1, 1, 17))
    more.grad = torch.linspace(0, 1, 17)
    optimizer.add_param_group({"params": [more], "lr": 0.03})
    params.append(more)


def exchange_param(optimizer: CPUOptimizer, params: list[nn.Parameter]) -> None:
    params[1] = nn.Parameter(params[1].detach() + 1)
    params[1].grad = torch.ones_like(params[1])
    optimizer.param_groups[0]["params"][1] = params[1]


def set_all(optimizer: CPUOptimizer, key: str, value: Any) -> None:
    for group in optimizer.param_groups:
        if key in group:
            group[key] = value


CHANGES: dict[str, Change] = {
    "nothing": lambda o, p: None,
    "a gradient less": lambda o, p: setattr(p[1], "grad", None),
    "no gradient at all": lambda o, p: [setattr(q, "grad", None) for q in p],
    "the same gradients again": lambda o, p: [q.grad.mul_(0.5) for q in p if q.grad is not None],
    "a negated gradient": negated_gradient,
    "a turned gradient": turned_gradient,
    "parameter moved": lambda o, p: setattr(p[0], "data", p[0].data.clone() + 1),
    "parameter edited": lambda o, p: p[0].data.add_(1),
    "parameter turned": transpose,
    "parameter exchanged": exchange_param,
    "state replaced": replace_state,
    "state moved": move_state,
    "state loaded": set_state_aside,
    "state forgotten": forget_state,
    "one state forgotten": forget_one,
    "group added": add_group,
    "order changed": lambda o, p: o.param_groups[0]["params"].reverse(),
    "lr changed": lambda o, p: set_all(o, "lr", 0.3),
    "lr a tensor": lambda o, p: set_all(o, "lr", torch.tensor(0.2)),
    "amsgrad begun": lambda o, p: (
        isinstance(o, CPUAdamW) and o.moment_dtype == torch.float32 and set_all(o, "amsgrad", True)
    ),
    "momentum ended": lambda o, p: set_all(o, "momentum", 0.0),
    "scaled": lambda o, p: setattr(o, "grad_scale", torch.tensor(4.0)),
    "found inf": lambda o, p: setattr(o, "found_inf", torch.tensor(1.0)),
}


def run(
    make: Callable[[Any], CPUOptimizer], change: Change, dtype: torch.dtype, anew: bool
) -> list[Any]:
    params = model(dtype)
    optimizer = make(params)
    for step in range(7):
        give_grads(params, seed=step)
        if step == 4:
            change(optimizer, params)
        if anew:
            optimizer._kept_updates = None
        optimizer.step()
    return [params, [dict(optimizer.state[p]) if p in optimizer.state else {} for p in params]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", MAKERS)
@pytest.mark.parametrize("change", CHANGES)
def test_kept_updates_give_the_bits_of_reading_anew(
    change: str, rule: str, dtype: torch.dtype
) -> None:
    kept, kept_state = run(MAKERS[rule], CHANGES[change], dtype, anew=False)
    anew, anew_state = run(MAKERS[rule], CHANGES[change], dtype, anew=True)
    for p, q in zip(kept, anew, strict=True):
        assert torch.equal(p, q)
    for a, b in zip(kept_state, anew_state, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.mark.parametrize("rule", [name for name in MAKERS if name != "plain sgd"])
def test_updates_are_kept_from_step_to_step(rule: str) -> None:
    params = model(torch.float32)
    optimizer = MAKERS[rule](params)
    kept = []
    for step in range(5):
        give_grads(params, seed=step)
        optimizer.step()
        kept.append(optimizer._kept_updates)
    assert kept[-1] is not None
    assert kept[-1] is kept[-2] is kept[-3]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p, o: setattr(p, "data", p.data.view(7, 33)), "shape"),
        (lambda p, o: o.state[p].update(exp_avg=torch.zeros(3)), "shape"),
        (lambda p, o: o.state[p].update(exp_avg=p.data), "overlaps"),
        (lambda p, o: o.state[p]["exp_avg"].resize_(7, 33), "shape"),
        (lambda p, o: p.grad.resize_(33), "shape"),
    ],
)
def test_what_is_wrong_at_a_later_step_is_said_as_at_the_first(
    spoil: Callable[[nn.Parameter, CPUOptimizer], Any], message: str
) -> None:
    params = model(torch.float32)
    optimizer = CPUAdamW(params)
    for step in range(3):
        give_grads(params, seed=step)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    give_grads(params[1:], seed=9)
    params[0].grad = torch.ones(33, 7)
    spoil(params[0], optimizer)
    with pytest.raises((ValueError, RuntimeError), match=message):
        optimizer.step()
    for p, was in zip(params[1:], before[1:], strict=True):
        assert torch.equal(p, was)


def test_gradients_of_another_dtype_than_the_step_before_are_read_as_such() -> None:
    def run(anew: bool) -> nn.Parameter:
        param = nn.Parameter(torch.ones(40))
        param.grad_dtype = None  # gradients of any dtype may be assigned
        optimizer = CPUAdamW([param])
        for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32):
            param.grad = torch.linspace(-1, 1, 40).to(dtype)
            if anew:
                optimizer._kept_updates = None
            optimizer.step()
        return param

    assert torch.equal(run(anew=False), run(anew=True))


class Asked(torch.Tensor):
    """A tensor that has to be asked before its memory is read, as one that moves has."""

    asked = 0

    def data_ptr(self) -> int:
        type(self).asked += 1
        return super().data_ptr()


class AskedParameter(Asked, nn.Parameter):
    """The same of a parameter."""


@pytest.mark.parametrize("which", ["parameter", "gradient"])
def test_what_has_begun_to_move_is_asked_before_it_is_read(which: str) -> None:
    params = model(torch.float32)
    optimizer = CPUAdamW(params)
    for step in range(4):
        give_grads(params, seed=step)
        if step == 3 and which == "gradient":
            params[0].grad = params[0].grad.as_subclass(Asked)  # type: ignore[union-attr]
        elif step == 3:
            params[0].__class__ = AskedParameter
        Asked.asked = AskedParameter.asked = 0
        optimizer.step()
    assert Asked.asked + AskedParameter.asked > 0


def test_a_gradient_that_shares_memory_with_its_parameter_is_refused_at_a_later_step() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdamW([param])
    for _ in range(3):
        param.grad = torch.ones(4)
        optimizer.step()
    param.grad = param.data
    with pytest.raises(ValueError, match="overlaps"):
        optimizer.step()


def test_a_shared_copy_of_the_weights_made_lazily_keeps_its_values() -> None:
    params = model(torch.float32)
    optimizer = CPUAdamW(params)
    for step in range(3):
        give_grads(params, seed=step)
        optimizer.step()
    lazily = torch._lazy_clone(params[0].detach())
    before = lazily.numpy(force=True).copy()
    give_grads(params, seed=5)
    optimizer.step()
    assert (lazily.numpy(force=True) == before).all()
    assert not (params[0].numpy(force=True) == before).all()


def test_an_optimizer_held_by_a_hook_of_its_parameter_is_collected() -> None:
    params = model(torch.float32)
    optimizer = CPUAdamW(params)
    for step in range(3):
        give_grads(params, seed=step)
        optimizer.step()
    params[0].register_hook(lambda grad, held=optimizer: grad)
    seen, state = weakref.ref(optimizer), weakref.ref(params[0])
    del params, optimizer
    gc.collect()
    assert seen() is None
    assert state() is None
