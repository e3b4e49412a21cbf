"""What the rules make of hyper-parameters and step: in double, for each span its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from autohete import _C

WORKERS = _C.Workers(2)
PLAIN: dict[str, Any] = {
    "lr": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 0.0, "weight_decay": 0.0,
}  # fmt: skip
STEPS = [1, 2, 3, 5, 10, 31, 100, 316, 1000, 3162, 10_000, 100_000]
BETAS = [0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999]
NEAREST = 2.0**-24 * 1.001  # relative error of rounding to a float once


def ones(value: float = 1.0) -> Tensor:
    return torch.full((1,), value)


def step_from_one(hyper: dict[str, Any], step: int) -> float:
    """Return the parameter's change from 0 with both moments and the gradient at 1."""
    param = ones(0.0)
    made = _C.AdamHyper(**{**PLAIN, **hyper})
    update = (made, float(step), ones(), param, ones(), ones(), None, None)
    _C.adamw_(WORKERS, [update])
    return param.item()


@pytest.mark.parametrize("beta", BETAS)
def test_the_first_moment_s_correction_is_computed_in_double(beta: float) -> None:
    for step in STEPS:
        got = step_from_one({"beta1": beta, "beta2": 0.0}, step)
        want = -1 / (1 - beta**step)
        assert abs(got / want - 1) <= NEAREST, step


@pytest.mark.parametrize("beta", BETAS)
def test_the_second_moment_s_correction_is_computed_in_double(beta: float) -> None:
    for step in range(1, 400):
        got = step_from_one({"beta1": 0.0, "beta2": beta}, step)
        want = -math.sqrt(1 - beta**step)
        assert abs(got / want - 1) <= 2 * NEAREST, step  # its inverse, and the division


@pytest.mark.parametrize(("beta1", "beta2"), [(0.0, 0.999), (0.9, 0.0), (0.0, 0.0)])
def test_a_beta_of_0_keeps_nothing_of_the_moment(beta1: float, beta2: float) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 0.01
    exp_avg, exp_avg_sq = torch.full((1000,), 1e4), torch.full((1000,), 1e4)
    made = _C.AdamHyper(**{**PLAIN, "beta1": beta1, "beta2": beta2})
    update = (made, 3.0, grad, torch.ones(1000), exp_avg, exp_avg_sq, None, None)
    _C.adamw_(WORKERS, [update])
    if beta1 == 0:
        assert torch.equal(exp_avg, grad)
    if beta2 == 0:
        assert torch.equal(exp_avg_sq, grad * grad)


def adam_update(param: Tensor, hyper: dict[str, Any], step: float = 3.0) -> tuple[Any, ...]:
    moments = torch.full_like(param, 0.25), torch.full_like(param, 0.125)
    made = _C.AdamHyper(**{**PLAIN, **hyper})
    return (made, step, torch.ones_like(param), param, *moments, None, None)


def sgd_update(param: Tensor, hyper: dict[str, Any], first: bool = False) -> tuple[Any, ...]:
    made = _C.SgdHyper(**{"lr": 0.1, "momentum": 0.5, **hyper})
    return (made, first, torch.ones_like(param), param, torch.full_like(param, 0.25), None)


def lion_update(param: Tensor, hyper: dict[str, Any]) -> tuple[Any, ...]:
    made = _C.LionHyper(**{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, **hyper})
    return (made, 1.0, torch.ones_like(param), param, torch.full_like(param, 0.25), None)


RULES: dict[str, tuple[Any, Any]] = {
    "adamw": (_C.adamw_, adam_update),
    "sgd": (_C.sgd_, sgd_update),
    "lion": (_C.lion_, lion_update),
}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *((rule, {"lr": 0.5}) for rule in RULES),
    *((rule, {"weight_decay": 0.5}) for rule in RULES),
    *((rule, {"maximize": True}) for rule in RULES),
    *((rule, {"grad_scale": 0.25, "weight_decay": 0.25}) for rule in ("adamw", "sgd")),
    ("adamw", {"beta1": 0.5}), ("adamw", {"beta2": 0.5}), ("adamw", {"eps": 0.5}),
    ("adamw", {"decoupled_decay": False, "weight_decay": 0.5}),
    ("sgd", {"momentum": 0.9}), ("sgd", {"dampening": 0.5}), ("sgd", {"nesterov": True}),
    ("lion", {"beta2": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "other"), OTHERS)
def test_each_tensor_of_a_call_is_updated_with_its_own_numbers(
    rule: str, other: dict[str, Any]
) -> None:
    call, update = RULES[rule]
    hypers = [{}, other, {}, {}, other, other, {}]
    together = [update(torch.full((40,), 2.0), hyper) for hyper in hypers]
    alone = [update(torch.full((40,), 2.0), hyper) for hyper in hypers]
    call(WORKERS, together)
    for one in alone:
        call(WORKERS, [one])
    for a, b in zip(together, alone, strict=True):
        tensors = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, Tensor)]
        assert all(torch.equal(x, y) for x, y in tensors)
    moved = [one[3] for one in alone]
    state = [one[4] for one in alone]
    assert not torch.equal(moved[0], moved[1]) or not torch.equal(state[0], state[1])


def test_each_tensor_of_a_call_has_its_own_step() -> None:
    for call, make in (
        (_C.adamw_, lambda p, step: adam_update(p, {}, float(step))),
        (_C.sgd_, lambda p, step: sgd_update(p, {"dampening": 0.5}, first=step == 1)),
    ):
        steps = [1, 7, 1, 1, 7, 7, 1]
        together = [make(torch.ones(40), step) for step in steps]
        alone = [make(torch.ones(40), step) for step in steps]
        call(WORKERS, together)
        for one in alone:
            call(WORKERS, [one])
        assert all(torch.equal(a[3], b[3]) for a, b in zip(together, alone, strict=True))
        assert not torch.equal(alone[0][3], alone[1][3])


@pytest.mark.parametrize("rule", RULES)
def test_going_up_scales_the_gradient_as_going_down_does(rule: str) -> None:
    call, update = RULES[rule]
    scaled = update(torch.ones(40), {"maximize": True, "grad_scale": 0.25})
    plain = update(torch.ones(40), {"maximize": True})
    plain[2].mul_(0.25)
    call(WORKERS, [scaled])
    call(WORKERS, [plain])
    assert torch.equal(scaled[3], plain[3])
    assert torch.equal(scaled[4], plain[4])


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_l2_decay_is_added_to_the_scaled_gradient(rule: str) -> None:
    call, update = RULES[rule]
    decay: dict[str, Any] = {"weight_decay": 0.5}
    if rule == "adamw":
        decay["decoupled_decay"] = False
    scaled = update(torch.ones(40), {"grad_scale": 0.25, **decay})
    plain = update(torch.ones(40), decay)
    plain[2].mul_(0.25)
    call(WORKERS, [scaled])
    call(WORKERS, [plain])
    assert torch.equal(scaled[4], plain[4])


def test_a_largest_second_moment_that_is_nan_stays_nan() -> None:
    nan = float("nan")
    param, largest = torch.ones(20), torch.full((20,), 0.5)
    largest[3] = nan
    made = _C.AdamHyper(**{**PLAIN, "amsgrad": True})
    moments = torch.full((20,), 0.25), torch.full((20,), 0.125)
    _C.adamw_(WORKERS, [(made, 3.0, torch.ones(20), param, *moments, largest, None)])
    assert largest.isnan().nonzero().tolist() == [[3]]
    assert param.isnan().nonzero().tolist() == [[3]]
