"""SGD and Lion from the update's traversal: torch.optim.SGD and float64 runs are the oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autohete import _C

LEVELS = _C.cpu_features()["supported"]
TILE = 128 * 256
WORKERS = _C.Workers(2)
SGD: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "small momentum": {"lr": 0.1, "momentum": 0.3},
    "undamped": {"lr": 0.1, "momentum": 1.0},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "l2": {"lr": 0.1, "weight_decay": 0.1},
    "all": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
}
LION: dict[str, dict[str, Any]] = {
    "usual": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99},
    "decay": {"lr": 1e-3, "beta1": 0.95, "beta2": 0.98, "weight_decay": 1.0},
    "large decay": {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1.5},
    "small betas": {"lr": 1e-3, "beta1": 0.3, "beta2": 0.0, "maximize": True},
}


def values(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def ulp(size: Tensor) -> Tensor:
    size = size.abs().float()
    return (torch.nextafter(size, torch.tensor(float("inf"))) - size).double()


def sgd(
    param: Tensor, grad: Tensor, buffer: Tensor, first: bool, hyper: dict[str, Any], **how: Any
) -> _C.UpdateStats:
    half = how.pop("half", None)
    made = _C.SgdHyper(**hyper)
    return _C.sgd_(WORKERS, [(made, first, grad, param, buffer, half)], **how)


def lion(
    param: Tensor, grad: Tensor, exp_avg: Tensor, hyper: dict[str, Any], **how: Any
) -> _C.UpdateStats:
    half = how.pop("half", None)
    made = _C.LionHyper(**hyper)
    return _C.lion_(WORKERS, [(made, 1.0, grad, param, exp_avg, half)], **how)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rule", SGD)
def test_one_step_of_sgd_is_within_two_ulp_of_torch(rule: str, first: bool) -> None:
    h, numel = SGD[rule], 5003
    param, grad, buffer = values(numel, 0), values(numel, 1), values(numel, 2)
    theirs = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.SGD([theirs], **h, foreach=False)
    if not first and h.get("momentum"):
        optimizer.state[theirs]["momentum_buffer"] = buffer.clone()
    theirs.grad = grad.clone()
    optimizer.step()
    before = param.clone()
    sgd(param, grad, buffer, first, h)
    # A term that enters a sum brings the rounding of its own making along, in torch as here.
    gradient = grad.abs() + h.get("weight_decay", 0) * before.abs()
    size = torch.maximum(gradient, values(numel, 2).abs() if not first else gradient)
    allowed = 2 * ulp(torch.maximum(before.abs(), param.abs())) + 0.1 * 6 * ulp(2 * size)
    assert ((param.double() - theirs.detach().double()).abs() <= allowed).all()
    if h.get("momentum"):
        want = optimizer.state[theirs]["momentum_buffer"]
        assert ((buffer.double() - want.double()).abs() <= 2 * ulp(size) + ulp(want)).all()


@pytest.mark.parametrize("rule", SGD)
def test_a_hundred_steps_of_sgd_are_no_further_from_float64_than_torch(rule: str) -> None:
    h, numel = SGD[rule], 5000
    if rule == "all":
        h = {**h, "lr": 0.001}  # maximizing with decay grows
    ours, exact = values(numel, 0), values(numel, 0).double()
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.nn.Parameter(exact)
    optimizers = [torch.optim.SGD([p], **h, foreach=False) for p in (theirs, reference)]
    buffer = torch.full((numel,), float("nan"))  # not looked at in the first step
    for t in range(100):
        grad = values(numel, t + 1)
        theirs.grad, reference.grad = grad.clone(), grad.double()
        for optimizer in optimizers:
            optimizer.step()
        sgd(ours, grad, buffer, t == 0, h)
    error = (ours.double() - reference).abs()
    torch_error = (theirs.double() - reference).abs()
    assert error.mean() <= 1.1 * torch_error.mean()


def test_an_infinite_buffer_of_sgd_stays_infinite() -> None:
    inf = float("inf")
    param, buffer = torch.ones(3), torch.tensor([inf, -inf, 1.0])
    sgd(param, torch.ones(3), buffer, False, SGD["momentum"])
    assert buffer.tolist() == [inf, -inf, pytest.approx(1.9)]
    assert param.tolist() == [-inf, inf, pytest.approx(0.81)]


def float64_lion(param: Tensor, exp_avg: Tensor, grad: Tensor, h: dict[str, Any]) -> Tensor:
    """Take one step in place as algorithm 2 of the paper writes it; return the interpolation."""
    g = -grad if h.get("maximize") else grad
    c = h["beta1"] * exp_avg + (1 - h["beta1"]) * g
    param -= h["lr"] * (c.sign() + h.get("weight_decay", 0.0) * param)
    exp_avg.copy_(h["beta2"] * exp_avg + (1 - h["beta2"]) * g)
    return c


@pytest.mark.parametrize("rule", LION)
def test_lion_follows_the_paper_in_float64(rule: str) -> None:
    h, numel = LION[rule], 5000
    ours, exp_avg = values(numel, 0), torch.zeros(numel)
    exact, exact_avg = ours.double(), torch.zeros(numel).double()
    clear = torch.ones(numel, dtype=torch.bool)  # the sign was beyond doubt in every step
    for t in range(30):
        grad = values(numel, t + 1)
        c = float64_lion(exact, exact_avg, grad.double(), h)
        clear &= c.abs() > 1e-5
        lion(ours, grad, exp_avg, h)
    assert clear.float().mean() > 0.99
    assert ((exp_avg.double() - exact_avg).abs() <= 20 * ulp(torch.tensor(1.0))).all()
    error = (ours.double() - exact).abs() / ulp(torch.maximum(exact.abs(), torch.tensor(0.05)))
    assert error[clear].max() <= 40


def test_lion_moves_by_lr_and_keeps_zero_and_nan() -> None:
    param, exp_avg = torch.ones(5), torch.tensor([0.0, 0.0, 0.0, 0.0, float("inf")])
    grad = torch.tensor([3.0, -1e-30, 0.0, float("nan"), 1.0])
    stats = lion(param, grad, exp_avg, {"lr": 0.25, "beta1": 0.9, "beta2": 0.99})
    torch.testing.assert_close(
        param, torch.tensor([0.75, 1.25, 1.0, float("nan"), 0.75]), rtol=0, atol=0, equal_nan=True
    )
    assert stats.non_finite and exp_avg[4] == float("inf")


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["plain", "all", "nesterov", "decay", "small betas"])
def test_levels_threads_and_cuts_give_the_same_bits(
    rule: str, grad_dtype: torch.dtype, half_dtype: torch.dtype | None
) -> None:
    numel = TILE + 4567
    grad = values(numel, 1).to(grad_dtype)

    def step(level: str, cuts: list[int]) -> tuple[Any, ...]:
        param, state = values(numel, 0), values(numel, 2)
        half = None if half_dtype is None else param.to(half_dtype)
        if half is not None:
            half[::100] *= 2
        updates: list[Any] = []
        for a, b in zip([0, *cuts], [*cuts, numel], strict=True):
            piece = slice(a, b)
            tail = (grad[piece], param[piece], state[piece], None if half is None else half[piece])
            if rule in SGD:
                updates.append((_C.SgdHyper(**SGD[rule], grad_scale=0.3), False, *tail))
            else:
                updates.append((_C.LionHyper(**LION[rule], grad_scale=0.3), 1.0, *tail))
        call = _C.sgd_ if rule in SGD else _C.lion_
        stats = call(_C.Workers(len(cuts) + 1), updates, level=level)
        return param, state, half, stats

    want = step("scalar", [])
    assert want[3].grad_hash == _C.content_hash(WORKERS, [grad])
    assert want[3].edited == (0 if half_dtype is None else -(-numel // 100))
    for level in LEVELS:
        for cuts in ([], [1, 1000, 20_001], [TILE]):
            got = step(level, cuts)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            assert got[3].edited == want[3].edited
            if half_dtype is not None:
                assert torch.equal(got[2], got[0].to(half_dtype))


@pytest.mark.parametrize("numel", [1000, 3_000_001])
def test_out_of_place_equals_in_place_and_keeps_the_old_state(numel: int) -> None:
    param, state, grad = values(numel, 0), values(numel, 2), values(numel, 1)
    for call, hyper, flag in (
        (_C.sgd_, _C.SgdHyper(lr=0.1, momentum=0.9), False),
        (_C.lion_, _C.LionHyper(lr=0.1, beta1=0.9, beta2=0.99), 1.0),
    ):
        new = (torch.empty(numel), torch.empty(numel))
        call(WORKERS, [(hyper, flag, grad, param, state, None)], out=[new])
        assert torch.equal(param, values(numel, 0)) and torch.equal(state, values(numel, 2))
        there = (param.clone(), state.clone())
        call(WORKERS, [(hyper, flag, grad, *there, None)])
        assert torch.equal(new[0], there[0]) and torch.equal(new[1], there[1])


def test_sgd_without_momentum_needs_no_buffer() -> None:
    param = torch.ones(3)
    update = (_C.SgdHyper(lr=0.5), True, torch.ones(3), param, None, None)
    _C.sgd_(WORKERS, [update])
    assert param.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": float("nan")}, "sgd: lr is nan"),
        ({"lr": 0.1, "momentum": -1.0}, "sgd: momentum is -1"),
        ({"lr": 0.1, "nesterov": True}, "nesterov is set with momentum 0 and dampening 0"),
        ({"lr": 0.1, "weight_decay": float("inf")}, "sgd: weight_decay is inf"),
    ],
)
def test_bad_numbers_of_sgd_are_named(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sgd(torch.ones(2), torch.ones(2), torch.ones(2), True, hyper)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": 0.1, "beta1": 1.0, "beta2": 0.9}, "lion: beta1 is 1, expected"),
        ({"lr": 0.1, "beta1": 0.9, "beta2": float("nan")}, "lion: beta2 is nan, expected"),
        ({"lr": float("inf"), "beta1": 0.9, "beta2": 0.9}, "lion: lr is inf"),
    ],
)
def test_bad_numbers_of_lion_are_named(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lion(torch.ones(2), torch.ones(2), torch.ones(2), hyper)


def test_bad_tensors_are_named() -> None:
    hyper = _C.LionHyper(lr=0.1, beta1=0.9, beta2=0.99)
    good = torch.ones(3)
    for place, bad, message in (
        (2, torch.ones(4), "lion_: grad has shape"),
        (3, torch.ones(3).double(), "lion_: param is Double, expected float32"),
        (4, torch.ones(3).half(), "lion_: exp_avg is float16, expected float32 or bfloat16"),
        (4, torch.ones(3).bfloat16(), "lion_: random is None with bfloat16 states"),
        (5, torch.ones(3), "lion_: half is float32, expected bfloat16 or float16"),
        (4, good, "lion_: exp_avg overlaps param"),
    ):
        update = [hyper, 1.0, torch.ones(3), good, torch.ones(3), None]
        update[place] = bad
        with pytest.raises(ValueError, match=message):
            _C.lion_(WORKERS, [tuple(update)])
    assert good.tolist() == [1, 1, 1]
