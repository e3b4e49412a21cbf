"""CPUAdam, CPUSGD, CPULion and bf16 moments as optimizers; CPUAdamW has test_optim.py."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete
from autohete import CPUSGD, CPUAdam, CPUAdamW, CPULion

HALVES = [torch.bfloat16, torch.float16]
OURS: list[tuple[Any, dict[str, Any]]] = [
    (CPUAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (CPUSGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (CPUSGD, {"lr": 0.01}),
    (CPULion, {"lr": 1e-3, "weight_decay": 0.1}),
    (CPUAdamW, {"lr": 0.01, "moment_dtype": torch.bfloat16, "seed": 3}),
]


def params_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
        optimizer.step()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.parametrize(
    ("ours", "theirs", "kwargs"),
    [
        (CPUAdam, torch.optim.Adam, {}),
        (CPUAdam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
        (CPUSGD, torch.optim.SGD, {"lr": 0.01}),
        (CPUSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
        (CPUSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True,
                                   "weight_decay": 0.1, "maximize": True}),
    ],
)  # fmt: skip
def test_state_dict_groups_and_values_are_those_of_the_namesake(
    ours: Any, theirs: Any, kwargs: dict[str, Any]
) -> None:
    params, others = params_of((20, 3), (5,)), params_of((20, 3), (5,))
    mine, reference = ours(params, **kwargs), theirs(others, **kwargs)
    train(mine, range(5))
    train(reference, range(5))
    a, b = mine.state_dict(), reference.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert {k: set(v) for k, v in a["state"].items()} == {k: set(v) for k, v in b["state"].items()}
    back, crossed = ours(others, **kwargs), theirs(params, **kwargs)
    back.load_state_dict(b)
    crossed.load_state_dict(copy.deepcopy(a))
    train(back, range(5, 8))
    train(crossed, range(5, 8))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_lion_needs_nothing_but_exp_avg() -> None:
    (p,) = params_of((6,))
    before = p.detach().clone()
    optimizer = CPULion([p], lr=0.5)
    train(optimizer, range(1))
    assert list(optimizer.state[p]) == ["exp_avg"]
    assert p.grad is not None
    torch.testing.assert_close(p.detach(), before - 0.5 * p.grad.sign())


@pytest.mark.parametrize(("cls", "kwargs"), OURS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("how", ["dict", "file", "deepcopy"])
def test_resuming_gives_the_bits_of_never_having_stopped(
    cls: Any, kwargs: dict[str, Any], dtype: torch.dtype, how: str
) -> None:
    def make() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(p.detach().to(dtype)) for p in params_of((50, 3), (7,))]
        return params, cls(params, **kwargs)

    straight, reference = make()
    train(reference, range(9))
    first, before = make()
    train(before, range(5))
    if how == "deepcopy":
        second, after = copy.deepcopy((first, before))
    else:
        second, after = make()
        saved = before.state_dict()
        if how == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        with torch.no_grad():
            for a, b in zip(second, first, strict=True):
                a.copy_(b)
        after.load_state_dict(saved)
    train(after, range(5, 9))
    assert same([p.detach() for p in second], [p.detach() for p in straight])
    assert same(after.state_dict(), reference.state_dict())


@pytest.mark.parametrize(("cls", "kwargs"), OURS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_parameter_is_its_rounded_master_and_takes_edits(
    cls: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    p = nn.Parameter(params_of((1000,))[0].detach().to(dtype))
    full = nn.Parameter(p.detach().float())
    ours, reference = cls([p], **kwargs), cls([full], **kwargs)
    for t in range(4):
        rng = torch.Generator().manual_seed(t)
        p.grad = torch.randn(1000, generator=rng).to(dtype)
        full.grad = p.grad.float()
        if t == 2:
            with torch.no_grad():
                p[:10] = 7
                full[:10] = 7
        ours.step()
        reference.step()
    assert torch.equal(ours.state[p]["master"], full)
    assert torch.equal(p, full.to(dtype))


@pytest.mark.parametrize(("cls", "kwargs"), OURS)
def test_layouts_and_workers_change_no_bit(cls: Any, kwargs: dict[str, Any]) -> None:
    start = params_of((6, 40_000))[0].detach()
    plain = nn.Parameter(start.t().contiguous())
    odd = nn.Parameter(start.clone().t())
    odd.data = start.clone()[:, ::2].t()  # neither dense nor contiguous
    plain.data = plain.data[::2].contiguous()
    one, other = cls([plain], **kwargs, num_workers=1), cls([odd], **kwargs, num_workers=3)
    train(one, range(3))
    train(other, range(3))
    if kwargs.get("moment_dtype") is None:  # places in memory are not the same, so roundings differ
        assert torch.equal(plain, odd)
    else:
        torch.testing.assert_close(plain.detach(), odd.detach(), rtol=0.1, atol=0.05)


@pytest.mark.parametrize(("cls", "kwargs"), OURS)
def test_grad_scaler_divides_and_skips(cls: Any, kwargs: dict[str, Any]) -> None:
    p, q = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    scaled, plain = cls([p], **kwargs), cls([q], **kwargs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for t in range(4):
        x = torch.full((8,), float("inf")) if t == 1 else torch.arange(1.0, 9.0)
        p.grad = q.grad = None
        scaler.scale((p * x).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        if t != 1:
            (q * x).sum().backward()
            plain.step()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(p, q) and same(scaled.state_dict()["state"], plain.state_dict()["state"])


def test_bf16_moments_take_half_the_memory_and_train_as_well() -> None:
    target = params_of((400,))[0].detach()
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.zeros(400))
        optimizer = CPUAdamW([p], lr=0.02, weight_decay=0.0, moment_dtype=dtype)
        for _ in range(200):
            p.grad = p.detach() - target
            optimizer.step()
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
        ends.append(float((p.detach() - target).abs().mean()))
    assert ends[1] < 2 * ends[0] + 0.02


def test_bf16_moments_follow_their_seed() -> None:
    def run(seed: int, num_workers: int) -> Tensor:
        p = nn.Parameter(params_of((70_000,))[0].detach().clone())
        train(
            CPUAdamW([p], moment_dtype=torch.bfloat16, seed=seed, num_workers=num_workers), range(3)
        )
        return p.detach()

    assert torch.equal(run(1, 1), run(1, 3))
    assert not torch.equal(run(1, 1), run(2, 1))


def test_equal_parameters_get_different_random_numbers() -> None:
    a, b = nn.Parameter(torch.zeros(500)), nn.Parameter(torch.zeros(500))
    optimizer = CPUAdamW([{"params": [a]}, {"params": [b]}], moment_dtype=torch.bfloat16)
    a.grad = b.grad = torch.full((500,), 0.1234)
    optimizer.step()
    assert not torch.equal(optimizer.state[a]["exp_avg"], optimizer.state[b]["exp_avg"])


def test_bf16_moments_are_never_the_default() -> None:
    (p,) = params_of((3,))
    optimizer = CPUAdamW([p])
    train(optimizer, range(1))
    assert optimizer.moment_dtype == optimizer.state[p]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: CPUSGD(p, lr=-1.0), "CPUSGD: lr is -1.0, expected"),
        (lambda p: CPUSGD(p, momentum=float("nan")), "CPUSGD: momentum is nan"),
        (lambda p: CPUSGD(p, nesterov=True), "nesterov is True with momentum 0.0 and dampening"),
        (lambda p: CPUSGD(p, differentiable=True), "use torch.optim.SGD"),
        (lambda p: CPULion(p, betas=(0.9, 1.0)), r"CPULion: betas\[1\] is 1.0"),
        (lambda p: CPULion(p, weight_decay=-1.0), "CPULion: weight_decay is -1.0"),
        (lambda p: CPUAdam(p, capturable=True), "use torch.optim.Adam"),
        (lambda p: CPUAdamW(p, moment_dtype=torch.float16), "moment_dtype is torch.float16"),
        (lambda p: CPUAdamW(p, amsgrad=True, moment_dtype=torch.bfloat16), "amsgrad is True with"),
    ],
)
def test_what_cannot_be_done_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(params_of((2,)))


def test_a_failed_first_step_of_sgd_leaves_no_buffer() -> None:
    a, b = params_of((2,), (2,))
    optimizer = CPUSGD([a, b], lr=0.1, momentum=0.9)
    a.grad, b.grad = torch.ones(2), torch.ones(2).to_sparse()
    with pytest.raises(ValueError, match="grad is Sparse"):
        optimizer.step()
    assert "momentum_buffer" not in optimizer.state[a] and "momentum_buffer" not in b.__dict__


def test_the_package_offers_them() -> None:
    for name in ("CPUAdam", "CPUAdamW", "CPULion", "CPUSGD"):
        assert name in autohete.__all__ and isinstance(getattr(autohete, name), type)
