"""bf16 moments are rounded at random: without bias, and from the same numbers every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autohete import _C

LEVELS = _C.cpu_features()["supported"]
WORKERS = _C.Workers(2)
TILE = 128 * 256
USUAL = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def values(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def fresh(numel: int) -> dict[str, Tensor]:
    exp_avg = (values(numel, 1) * 0.1).bfloat16()
    exp_avg_sq = ((values(numel, 2) * 0.1) ** 2).bfloat16()
    return {"param": values(numel, 0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def step(
    state: dict[str, Tensor],
    grad: Tensor,
    *,
    number: float = 3.0,
    seed: int = 7,
    cuts: tuple[int, ...] = (),
    num_workers: int = 2,
    level: str | None = None,
    hyper: dict[str, Any] | None = None,
) -> None:
    made = _C.AdamHyper(**{**USUAL, **(hyper or {})})
    updates = []
    for a, b in zip((0, *cuts), (*cuts, len(grad)), strict=True):
        tensors = (tensor[a:b] for tensor in state.values())
        updates.append((made, number, grad[a:b], *tensors, None, None, (seed, a)))
    _C.adamw_(_C.Workers(num_workers), updates, level=level)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def test_threads_cuts_and_instruction_sets_change_no_bit() -> None:
    numel = 2 * TILE + 777
    grad = values(numel, 3)
    want = fresh(numel)
    step(want, grad, level="scalar", num_workers=1)
    for level in LEVELS:
        for cuts in ((), (1, 130, 20_001), (TILE, TILE + 3)):
            got = fresh(numel)
            step(got, grad, level=level, cuts=cuts, num_workers=len(cuts) + 1)
            assert equal(got, want)


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_value_is_not_rounded_up_to_infinity(level: str) -> None:
    largest = float(torch.finfo(torch.bfloat16).max)
    state = fresh(1000)
    grad = torch.full((1000,), torch.finfo(torch.float32).max)
    step(state, grad, level=level, hyper={"beta1": 0.0})
    assert (state["exp_avg"] == largest).all()


def test_another_seed_step_or_place_gives_other_rounding() -> None:
    numel = 10_000
    grad = values(numel, 3)
    kinds: list[dict[str, Any]] = [{}, {"seed": 8}, {"number": 3.0 + 2**20}]
    results = []
    for kind in kinds:
        # The step number enters the moments by the rounding alone.
        state = fresh(numel)
        step(state, grad, **kind)
        results.append(state["exp_avg"])
    for i, a in enumerate(results):
        for b in results[:i]:
            assert 0.1 < (a != b).float().mean() < 0.6
    same = {key: value[:1].repeat(numel) for key, value in fresh(1).items()}
    step(same, grad[:1].repeat(numel))
    assert same["exp_avg"].unique().numel() == 2  # the two neighbours


def test_the_new_moment_is_one_of_the_two_neighbours_and_right_on_average() -> None:
    numel, times = 2000, 400
    grad = values(numel, 3)
    exact = {key: value.float() for key, value in fresh(numel).items()}
    hyper = _C.AdamHyper(**USUAL)
    _C.adamw_(WORKERS, [(hyper, 3.0, grad, *exact.values(), None, None)])
    total = {key: torch.zeros(numel).double() for key in ("exp_avg", "exp_avg_sq")}
    for seed in range(times):
        state = fresh(numel)
        step(state, grad, seed=seed)
        for key, sums in total.items():
            sums += state[key].double()
            unit = (exact[key].abs().log2().floor() - 7).exp2()
            assert ((state[key].float() - exact[key]).abs() < unit).all()
    for key, sums in total.items():
        unit = (exact[key].abs().log2().floor() - 7).exp2().double()
        error = (sums / times - exact[key].double()) / unit
        # The mean of `times` draws of a value in [-1, 1] unit with a deviation of at most 1/2.
        assert error.abs().max() < 5 * 0.5 / times**0.5
        assert error.mean().abs() < 5 * 0.5 / (times * numel) ** 0.5


def test_the_two_moments_are_rounded_independently() -> None:
    numel = 20_000
    param = torch.zeros(numel)
    state = {
        "param": param,
        "exp_avg": torch.zeros(numel).bfloat16(),
        "exp_avg_sq": torch.zeros(numel).bfloat16(),
    }
    step(state, torch.full((numel,), 0.01357), hyper={"beta2": 0.9})
    up = [state[key].float() > state[key].float().mean() for key in ("exp_avg", "exp_avg_sq")]
    shares = [u.float().mean() for u in up]
    both = (up[0] & up[1]).float().mean()
    assert all(0.02 < share < 0.98 for share in shares)
    assert abs(both - shares[0] * shares[1]) < 0.02


def test_small_changes_add_up_which_rounding_to_nearest_would_lose() -> None:
    numel, steps = 5000, 300
    state = {
        "param": torch.zeros(numel),
        "exp_avg": torch.zeros(numel).bfloat16(),
        "exp_avg_sq": torch.ones(numel).bfloat16(),
    }
    for t in range(1, steps + 1):
        step(state, torch.zeros(numel), number=float(t))
    # beta2 of 0.999: a change of a thousandth, a quarter of bf16's unit below 1.
    assert float(state["exp_avg_sq"].double().mean()) == pytest.approx(0.999**steps, rel=0.003)


def test_infinite_huge_and_missing_values_stay_what_they_are() -> None:
    inf, largest = float("inf"), torch.finfo(torch.bfloat16).max
    exp_avg = torch.tensor([inf, largest, float("nan")]).bfloat16().repeat(1000)
    param = torch.zeros(3000)
    hyper = _C.SgdHyper(lr=0.0, momentum=1.0)
    update = (hyper, False, torch.zeros(3000), param, exp_avg, None, (1, 0))
    _C.sgd_(WORKERS, [update])
    assert (exp_avg[0::3] == inf).all() and (exp_avg[1::3] == largest).all()
    assert exp_avg[2::3].isnan().all()


def test_training_ends_near_fp32_moments() -> None:
    numel = 4000
    target = values(numel, 5)
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        state = {
            "param": torch.zeros(numel),
            "exp_avg": torch.zeros(numel, dtype=dtype),
            "exp_avg_sq": torch.zeros(numel, dtype=dtype),
        }
        for t in range(1, 201):
            grad = state["param"] - target + 0.1 * values(numel, 100 + t)
            step(state, grad, number=float(t), hyper={"lr": 1e-2, "weight_decay": 0.0})
        runs.append(state["param"])
    rms = float(((runs[0] - runs[1]) ** 2).mean().sqrt())
    assert rms < 0.02 * float((runs[0] ** 2).mean().sqrt())


def test_what_cannot_be_rounded_at_random_is_refused() -> None:
    state = fresh(4)
    hyper = _C.AdamHyper(**USUAL, amsgrad=True)
    largest = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="state_dtype is bfloat16 with amsgrad, expected float32"):
        _C.adamw_(WORKERS, [(hyper, 1.0, torch.ones(4), *state.values(), largest, None, (1, 0))])
    plain = _C.AdamHyper(**USUAL)
    with pytest.raises(ValueError, match="random is None with bfloat16 states"):
        _C.adamw_(WORKERS, [(plain, 1.0, torch.ones(4), *state.values(), None, None)])
    state["exp_avg"] = state["exp_avg"].float()
    with pytest.raises(ValueError, match="exp_avg_sq is BFloat16, expected float32, as the first"):
        _C.adamw_(WORKERS, [(plain, 1.0, torch.ones(4), *state.values(), None, None, (1, 0))])
