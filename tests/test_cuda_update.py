"""The rule for units that stay on the GPU. It is made of device-neutral calls: tried on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autohete import _C
from autohete.cuda_update import update_group, update_on_cuda
from autohete.units import Unit

SHAPES = ((8, 3), (5,), (4, 4))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def state_of(parameter: nn.Parameter, amsgrad: bool) -> dict[str, torch.Tensor]:
    keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    state = {key: torch.zeros(parameter.shape) for key in keys}
    state["step"] = torch.tensor(0.0)
    if parameter.dtype != torch.float32:
        state["master"] = parameter.detach().float()
    return state


def hyper(**changes: object) -> _C.AdamHyper:
    values = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    return _C.AdamHyper(**(values | changes))


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_gives_the_bits_of_torchs_foreach_optimizers(optimizer, amsgrad, maximize):
    ours, theirs = parameters(), parameters()
    states = [state_of(p, amsgrad) for p in ours]
    flags = {"amsgrad": amsgrad, "maximize": maximize}
    reference = optimizer(
        theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, foreach=True, **flags
    )
    rule = hyper(decoupled_decay=optimizer is torch.optim.AdamW, **flags)
    for step in range(5):
        for p, q, gradient in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = gradient, gradient.clone()
        with torch.no_grad():
            update_group(list(zip(ours, states, strict=True)), rule)
        reference.step()
    for p, q, state in zip(ours, theirs, states, strict=True):
        assert torch.equal(p, q)
        expected = reference.state[q]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected), "steps once too"


def test_scaled_gradients_are_unscaled_and_left_as_they_are():
    ours, theirs = parameters(), parameters()
    states, expected = ([state_of(p, False) for p in ps] for ps in (ours, theirs))
    for p, q, gradient in zip(ours, theirs, gradients(0), strict=True):
        p.grad, q.grad = gradient * 1024, gradient
    before = [p.grad.clone() for p in ours]
    with torch.no_grad():
        update_group(list(zip(ours, states, strict=True)), hyper(grad_scale=1 / 1024))
        update_group(list(zip(theirs, expected, strict=True)), hyper())
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_follow_fp32_masters(dtype):
    ours = parameters(dtype)
    states = [state_of(p, False) for p in ours]
    masters = [nn.Parameter(p.detach().float()) for p in ours]
    reference = torch.optim.AdamW(
        masters, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, foreach=True
    )
    for step in range(4):
        if step == 2:  # an edit by the user: the parameter counts, not its master
            with torch.no_grad():
                ours[0][0] *= 3
                masters[0][0] = ours[0][0].float()
        for p, q, gradient in zip(ours, masters, gradients(step), strict=True):
            p.grad = gradient.to(dtype)
            q.grad = p.grad.float()
        with torch.no_grad():
            update_group(list(zip(ours, states, strict=True)), hyper())
        reference.step()
        for p, q, state in zip(ours, masters, states, strict=True):
            assert torch.equal(p, q.to(dtype))
            assert torch.equal(state["master"], q)


def test_only_units_the_engine_does_not_update_and_parameters_with_gradients_change():
    first, second = parameters(), parameters()
    units = [
        Unit("managed", [nn.Linear(1, 1)], list(first)),
        Unit("own", [nn.Linear(1, 1)], list(second)),
    ]
    for p, gradient in zip([*first, *second[:2]], [*gradients(0), *gradients(1)[:2]], strict=True):
        p.grad = gradient
    before = copy.deepcopy([*first, *second])
    pairs = [(u, i) for u in range(2) for i in range(len(SHAPES))]
    states = {(u, i): state_of(units[u].parameters[i], False) for u, i in pairs}
    group_of = {id(units[u].parameters[i]): i % 2 for u, i in pairs}
    update_on_cuda(units, lambda u: u == 0, states, [hyper(), hyper(lr=0.0)], group_of)
    changed = [not torch.equal(p, q) for p, q in zip([*first, *second], before, strict=True)]
    assert changed == [False, False, False, True, False, False]
    assert {p: s["step"].item() for p, s in states.items() if s["step"]} == {(1, 0): 1, (1, 1): 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_updates_its_rows_as_the_whole_would_be_and_leaves_the_rest(dtype):
    whole, ours = parameters(dtype), parameters(dtype)
    before = [p.detach().clone() for p in ours]

    def rows(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(0, 2, min(3, len(parameter) - 2))

    states = [state_of(p, False) for p in whole]
    parts = []
    for p in ours:
        state = state_of(p, False)
        parts.append({k: v if v.dim() == 0 else rows(p, v).clone() for k, v in state.items()})
    for p, q, gradient in zip(whole, ours, gradients(0), strict=True):
        p.grad, q.grad = gradient.to(dtype), gradient.to(dtype)
    for params, state, cut in ((whole, states, None), (ours, parts, rows)):
        update_on_cuda(
            [Unit("all", [], params)],
            lambda unit: False,
            {(0, i): s for i, s in enumerate(state)},
            [hyper()],
            {id(p): 0 for p in params},
            cut,
        )
    for p, q, old, state, part in zip(whole, ours, before, states, parts, strict=True):
        assert torch.equal(rows(q, q), rows(p, p))
        assert torch.equal(q[:2], old[:2])
        assert torch.equal(part["exp_avg_sq"], rows(p, state["exp_avg_sq"]))
