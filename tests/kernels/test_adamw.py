"""The AdamW kernel: torch.optim and a float64 run are the oracles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from autohete import _C

LEVELS = _C.cpu_features()["supported"]
TILE = 128 * 256
USUAL: dict[str, Any] = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "no decay": {"weight_decay": 0.0},
    "l2": {"decoupled_decay": False, "weight_decay": 0.1},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "no momentum": {"beta1": 0.0, "beta2": 0.0},
    "small betas": {"beta1": 0.4, "beta2": 0.3},
    "large decay": {"lr": 0.9, "weight_decay": 0.9},
    "full decay": {"lr": 1.0, "weight_decay": 1.0},
    "all at once": {"decoupled_decay": False, "amsgrad": True, "maximize": True, "beta1": 0.3},
}


def random_state(numel: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a state as training leaves it: the second moment is at least the first squared."""
    rng = torch.Generator().manual_seed(seed)
    exp_avg = torch.randn(numel, generator=rng) * 0.1
    exp_avg_sq = exp_avg**2 + torch.rand(numel, generator=rng) * 0.01
    return {
        "param": torch.randn(numel, generator=rng),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "max_exp_avg_sq": exp_avg_sq * (1 + torch.rand(numel, generator=rng)),
    }


def random_grad(numel: int, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=rng)


def update(
    state: dict[str, Tensor],
    grad: Tensor,
    step: float | Tensor = 1.0,
    *,
    half: Tensor | None = None,
    hyper: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    made = _C.AdamHyper(**{**USUAL, **(hyper or {})})
    moments = (state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"])
    return (made, step, grad, state["param"], *moments, half)


def run(
    state: dict[str, Tensor],
    grad: Tensor,
    step: float = 1.0,
    *,
    half: Tensor | None = None,
    hyper: dict[str, Any] | None = None,
    level: str | None = None,
    num_workers: int = 2,
) -> _C.UpdateStats:
    workers = _C.Workers(num_workers)
    one = update(state, grad, step, half=half, hyper=hyper)
    return _C.adamw_(workers, [one], level=level)


def clone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a)


def torch_step(
    state: dict[str, Tensor], grad: Tensor, step: int, hyper: dict[str, Any], **how: Any
) -> dict[str, Tensor]:
    """Return the state after one step of torch's own optimizer from `state`."""
    h = {**USUAL, **hyper}
    cls = torch.optim.AdamW if h.get("decoupled_decay", True) else torch.optim.Adam
    param = torch.nn.Parameter(state["param"].clone())
    optimizer = cls(
        [param], h["lr"], (h["beta1"], h["beta2"]), h["eps"], h["weight_decay"],
        h.get("amsgrad", False), maximize=h.get("maximize", False), **how,
    )  # fmt: skip
    moments = {k: v.clone() for k, v in state.items() if k != "param"}
    optimizer.state[param] = {"step": torch.tensor(float(step - 1)), **moments}
    param.grad = grad.clone()
    optimizer.step()
    new = {k: v for k, v in optimizer.state[param].items() if k != "step"}
    return {"param": param.detach(), **new}


def ulp(size: Tensor) -> Tensor:
    """Return the unit in the last place of fp32 numbers of this size, in float64."""
    size = size.abs().float()
    return (torch.nextafter(size, torch.tensor(float("inf"))) - size).double()


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
@pytest.mark.parametrize("rule", RULES)
def test_one_step_from_equal_state_is_within_two_ulp_of_torch(rule: str, step: int) -> None:
    before, grad = random_state(5003), random_grad(5003)
    want = torch_step(before, grad, step, RULES[rule], foreach=False)
    got = clone(before)
    run(got, grad, step, hyper=RULES[rule])
    h = {**USUAL, **RULES[rule]}
    l2 = 0.0 if h.get("decoupled_decay", True) else h["weight_decay"]
    # Two ulp of the larger of old and new value. A term that enters a sum brings the rounding of
    # its own making along, in torch as here: it counts where it is larger than the sum.
    gradient = grad.abs() + l2 * before["param"].abs()
    decay = h["lr"] * h["weight_decay"] if not l2 else 0.0
    change = (want["param"] - (1 - decay) * before["param"]).abs()
    first = want["exp_avg"].abs()
    change *= torch.maximum(first, before["exp_avg"].abs()) / first  # where exp_avg cancelled
    term = {
        "param": 4 * ulp(change),  # five operations make it
        "exp_avg": 2 * (1 - h["beta1"]) * ulp(gradient),
        "exp_avg_sq": 2 * (1 - h["beta2"]) * ulp(gradient**2) if l2 else 0.0,
    }
    term["max_exp_avg_sq"] = term["exp_avg_sq"]
    for key in term:
        size = torch.maximum(before[key].abs(), want[key].abs()) if key in want else before[key]
        error = (got[key].double() - want.get(key, before[key]).double()).abs()
        assert (error <= 2 * ulp(size) + term[key]).all(), (key, (error / ulp(size)).max())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half_dtype", [None, torch.bfloat16, torch.float16])
def test_every_level_gives_the_same_bits(
    rule: str, grad_dtype: torch.dtype, half_dtype: torch.dtype | None
) -> None:
    grad = random_grad(70_003).to(grad_dtype)
    results = []
    for level in LEVELS:
        state = random_state(70_003)
        half = None if half_dtype is None else state["param"].to(half_dtype)
        stats = run(state, grad, 3, half=half, hyper=RULES[rule], level=level)
        results.append((state, half, stats.grad_sq_norm))
    for state, half, norm in results[1:]:
        assert same_bits(state, results[0][0])
        assert norm == results[0][2]
        if half is not None:
            assert torch.equal(half.view(torch.int16), results[0][1].view(torch.int16))
    if half is not None:
        assert torch.equal(half, results[0][0]["param"].to(half.dtype))


SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 1023, 1025,
         TILE - 1, TILE, TILE + 1, 3 * TILE + 5]  # fmt: skip


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_any_length_and_start_equals_one_element_at_a_time_and_touches_nothing_else(
    numel: int, shift: int
) -> None:
    margin = 64
    whole = dict(random_state(numel + 2 * margin + 1))
    canary = clone(whole)
    grad = random_grad(numel)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        storage = clone(whole)
        inside = slice(margin + shift, margin + shift + numel)
        state = {k: v[inside] for k, v in storage.items()}
        given = torch.zeros(numel + 1, dtype=dtype)[shift : shift + numel].copy_(grad)
        half_storage = storage["param"].to(torch.bfloat16)
        run(state, given, 2, half=half_storage[inside], num_workers=3)
        # The reference: spans of odd lengths, down to one element, by the scalar level.
        pieces = {k: v[inside].clone() for k, v in canary.items()}
        cuts = sorted(
            {0, 1, 2, 5, numel // 3, numel // 2, numel - 1, numel} & set(range(numel + 1))
        )
        updates = []
        for a, b in itertools.pairwise(cuts):
            updates.append(update({k: v[a:b] for k, v in pieces.items()}, given[a:b].clone(), 2))
        _C.adamw_(_C.Workers(1), updates, level="scalar")
        for key in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], pieces[key])
            assert torch.equal(storage[key][: margin + shift], canary[key][: margin + shift])
            assert torch.equal(storage[key][inside.stop :], canary[key][inside.stop :])
        assert torch.equal(half_storage[inside], pieces["param"].bfloat16())
        assert torch.equal(half_storage[inside.stop :], canary["param"][inside.stop :].bfloat16())


@pytest.mark.parametrize("num_workers", range(1, 9))
def test_the_number_of_workers_changes_no_bit(num_workers: int) -> None:
    numel = 3 * TILE + 5
    alone, shared = random_state(numel), random_state(numel)
    a = run(alone, random_grad(numel), 7, num_workers=1)
    b = run(shared, random_grad(numel), 7, num_workers=num_workers)
    assert same_bits(alone, shared)
    assert a.grad_sq_norm == b.grad_sq_norm


def test_correction_depends_on_beta_and_step_only_however_the_calls_are_split() -> None:
    workers = _C.Workers(2)

    def train(groups: list[list[int]]) -> list[dict[str, Tensor]]:
        states = [random_state(1000) for _ in range(4)]
        for i in range(50):
            step = float(i + 1 if i < 2 else i + 3)  # jumps from 2 to 5
            hyper = {"beta1": 0.9 if i < 10 else 0.8}
            for group in groups:
                grad = random_grad(1000, seed=i)
                _C.adamw_(
                    workers, [update(states[k], grad.clone(), step, hyper=hyper) for k in group]
                )
        return states

    reference = train([[0, 1, 2, 3]])
    for groups in ([[0, 1], [2, 3]], [[3], [1], [0], [2]], [[2, 0, 3, 1]]):
        for state in train(groups):
            assert same_bits(state, reference[0])


def float64_run(grads: list[Tensor], param: Tensor, h: dict[str, Any]) -> dict[str, Tensor]:
    p, m, v = param.double(), torch.zeros_like(param.double()), torch.zeros_like(param.double())
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        p = p * (1 - h["lr"] * h["weight_decay"])
        m = h["beta1"] * m + (1 - h["beta1"]) * g
        v = h["beta2"] * v + (1 - h["beta2"]) * g * g
        denominator = (v / (1 - h["beta2"] ** t)).sqrt() + h["eps"]
        p = p - h["lr"] * (m / (1 - h["beta1"] ** t)) / denominator
    return {"param": p, "exp_avg": m, "exp_avg_sq": v}


def test_a_hundred_steps_stay_closer_to_float64_than_torch() -> None:
    numel = 20_000
    start = random_state(numel)["param"]
    grads = [random_grad(numel, seed=t) for t in range(100)]
    exact = float64_run(grads, start, USUAL)
    zero = {k: torch.zeros(numel) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    ours = {"param": start.clone(), **clone(zero)}
    theirs = {"param": start.clone(), **zero}
    for t, grad in enumerate(grads, 1):
        run(ours, grad, t)
        theirs = {**theirs, **torch_step(theirs, grad, t, {}, fused=True)}
    error = {k: (ours[k].double() - exact[k]).abs() / ulp(exact[k]) for k in exact}
    torch_error = {k: (theirs[k].double() - exact[k]).abs() / ulp(exact[k]) for k in exact}
    # Where a weight happens to end near zero its ulp is far smaller than the steps that led there.
    settled = exact["param"].abs() > 0.05
    for key in ("param", "exp_avg_sq"):
        assert error[key].mean() < torch_error[key].mean()
        assert error[key].mean() <= 5
        assert error[key][settled].max() <= 50
        assert error[key][settled].max() < torch_error[key][settled].max()


@pytest.mark.parametrize("numel", [TILE + 77, 3_000_001])  # the second bypasses the caches
def test_out_of_place_equals_in_place_and_keeps_the_old_state(numel: int) -> None:
    for hyper in ({}, {"amsgrad": True}):
        old, in_place = random_state(numel), random_state(numel)
        new = {k: torch.full_like(v, float("nan")) for k, v in old.items()}
        grad = random_grad(numel)
        run(in_place, grad, 4, hyper=hyper)
        _C.adamw_(_C.Workers(2), [update(old, grad, 4.0, hyper=hyper)], out=[tuple(new.values())])
        keys = list(old) if hyper else list(old)[:3]
        assert same_bits({k: new[k] for k in keys}, {k: in_place[k] for k in keys})
        assert same_bits(old, random_state(numel))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [TILE + 77, 3_000_001])  # the second bypasses the caches
def test_out_of_place_leaves_the_old_half_copy_and_takes_edits_up(
    level: str, dtype: torch.dtype, numel: int
) -> None:
    old, in_place = random_state(numel), random_state(numel)
    old_half = old["param"].to(dtype)
    old_half[::1000] *= 2
    half, kept = old_half.clone(), old_half.clone()
    new = [torch.full_like(v, float("nan")) for v in list(old.values())[:3]]
    new_half = torch.full_like(half, float("nan"))
    grad = random_grad(numel)
    a = run(in_place, grad, 4, half=half, level=level)
    out = [(*new, None, new_half)]
    one = update(old, grad, 4.0, half=old_half)
    b = _C.adamw_(_C.Workers(2), [one], out=out, level=level)
    assert a.edited == b.edited == -(-numel // 1000) and a.grad_hash == b.grad_hash
    assert same_bits(old, random_state(numel)) and torch.equal(old_half, kept)
    assert torch.equal(new_half, half)
    for mine, reference in zip(new, list(in_place.values())[:3], strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_edited_half_copy_is_taken_up_and_counted(level: str, dtype: torch.dtype) -> None:
    numel = 1000
    state = random_state(numel)
    half = state["param"].to(dtype)
    edited = torch.arange(numel) % 7 == 3
    half[edited] *= 2
    expected = clone(state)
    expected["param"][edited] = half[edited].float()
    stats = run(state, random_grad(numel), 5, half=half, level=level)
    run(expected, random_grad(numel), 5)
    assert stats.edited == int(edited.sum())
    assert same_bits(state, expected)
    assert torch.equal(half, expected["param"].to(dtype))


def test_scale_and_clip_factor_multiply_the_gradient_once() -> None:
    scaled, plain = random_state(1000), random_state(1000)
    factor = 0.37 / 2**16
    grad = random_grad(1000) * 2**16
    run(scaled, grad, 3, hyper={"grad_scale": factor})
    run(plain, grad * torch.tensor(factor, dtype=torch.float32), 3)
    assert same_bits(scaled, plain)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 999, TILE + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_non_finite_gradient_is_reported(value: float, where: int, dtype: torch.dtype) -> None:
    grad = random_grad(TILE + 4).to(dtype)
    assert not run(random_state(TILE + 4), grad).non_finite
    grad[where] = value
    assert run(random_state(TILE + 4), grad).non_finite


def test_huge_finite_gradients_are_not_reported_and_the_norm_is_that_of_float64() -> None:
    grad = random_grad(TILE + 4) * 1e37
    stats = run(random_state(TILE + 4), grad)
    assert not stats.non_finite
    assert stats.grad_sq_norm == pytest.approx(float((grad.double() ** 2).sum()), rel=1e-13)


def test_infinite_values_go_where_torch_takes_them() -> None:
    inf = float("inf")
    before = {
        "param": torch.tensor([1.0, -inf, 1.0, 1.0, inf]),
        "exp_avg": torch.tensor([0.1, 0.1, 0.1, 0.1, 0.0]),
        "exp_avg_sq": torch.tensor([inf, 0.1, 0.1, 0.1, 0.1]),
        "max_exp_avg_sq": torch.tensor([inf, 0.1, 0.1, 0.1, 0.1]),
    }
    grad = torch.tensor([1.0, 1.0, inf, 1e20, float("nan")])
    for hyper in RULES.values():
        got = clone(before)
        run(got, grad, 2, hyper=hyper)
        want = torch_step(before, grad, 2, hyper, foreach=False)
        for key in want:
            if key != "max_exp_avg_sq" or hyper.get("amsgrad"):
                torch.testing.assert_close(got[key], want[key], equal_nan=True)


def test_the_callers_flush_to_zero_mode_changes_nothing() -> None:
    tiny = {k: v * 1e-38 for k, v in random_state(1000).items()}
    flushed = clone(tiny)
    grad = random_grad(1000) * 1e-38
    run(tiny, grad)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        run(flushed, grad)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(tiny, flushed)


def test_a_step_tensor_counts_on_exactly_past_two_to_the_24() -> None:
    step = torch.tensor(2.0**24 - 1)
    for expected in (2**24, 2**24 + 1, 2**24 + 2):
        _C.adamw_(_C.Workers(1), [update(random_state(4), random_grad(4), step)])
        assert int(step.item()) == expected


BAD_HYPER = [
    ("lr", float("nan")), ("lr", float("inf")), ("beta1", 1.0), ("beta1", float("nan")),
    ("beta2", -0.1), ("eps", -1e-8), ("eps", float("nan")), ("weight_decay", float("nan")),
    ("grad_scale", float("inf")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_HYPER)
def test_a_bad_hyper_parameter_is_named_and_nothing_is_written(name: str, value: float) -> None:
    good, bad = random_state(8), random_state(8)
    step = torch.tensor(3.0)
    updates = [update(good, random_grad(8), step), update(bad, random_grad(8), hyper={name: value})]
    with pytest.raises(ValueError, match=f"{name} is .*expected"):
        _C.adamw_(_C.Workers(1), updates)
    assert same_bits(good, random_state(8))
    assert step.item() == 3


def test_a_bad_tensor_is_named_with_what_it_is_and_what_it_should_be() -> None:
    def attempt(**changes: Any) -> None:
        state = random_state(12)
        grad = changes.pop("grad", random_grad(12))
        half, step = changes.pop("half", None), changes.pop("step", 1.0)
        _C.adamw_(_C.Workers(1), [update({**state, **changes}, grad, step, half=half)])

    shared = torch.zeros(20)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("exp_avg is Double, expected float32", {"exp_avg": torch.zeros(12).double()}),
        ("exp_avg_sq is BFloat16, expected float32", {"exp_avg_sq": torch.zeros(12).bfloat16()}),
        ("grad is Int, expected float32, bfloat16 or float16", {"grad": torch.zeros(12).int()}),
        ("half is float32, expected bfloat16 or float16", {"half": torch.zeros(12)}),
        (r"grad has shape \[11\], expected param's \[12\]", {"grad": torch.zeros(11)}),
        ("exp_avg has strides", {"exp_avg": torch.zeros(24)[::2]}),
        ("param has strides", {"param": torch.zeros(1).expand(12)}),
        ("grad is meta, expected a tensor on cpu", {"grad": torch.zeros(12, device="meta")}),
        ("grad is Sparse, expected a dense", {"grad": torch.zeros(12).to_sparse()}),
        ("grad is .*list.*, expected a tensor", {"grad": [1.0]}),
        ("overlaps", {"exp_avg": shared[:12], "exp_avg_sq": shared[8:]}),
        ("grad is a view whose memory", {"grad": torch._neg_view(torch.zeros(12))}),
        ("exp_avg is a view whose memory", {"exp_avg": torch._neg_view(torch.zeros(12))}),
        ("step is 'x', expected a number", {"step": "x"}),
        ("step is None, expected a number", {"step": None}),
        (r"step is \[3\], expected one number", {"step": torch.zeros(3)}),
        ("step is 0, expected the number of this update", {"step": 0.0}),
        ("step is inf, expected the number of this update", {"step": float("inf")}),
    ]
    for message, changes in cases:
        with pytest.raises(ValueError, match=message):
            attempt(**changes)
    good = update(random_state(12), random_grad(12))
    for message, changed in [
        ("hyper is None, expected an AdamHyper", (None, *good[1:])),
        ("hyper is .*SgdHyper.*, expected an AdamHyper", (_C.SgdHyper(lr=0.1), *good[1:])),
        (r"random is \(-1, 0\), expected \(seed, offset\), both", (*good, (-1, 0))),
        ("updates holds 5, expected tuples", 5),
    ]:
        with pytest.raises(ValueError, match=message):
            _C.adamw_(_C.Workers(1), [changed])
    with pytest.raises(ValueError, match="out holds 5, expected tuples"):
        _C.adamw_(_C.Workers(1), [good], out=[5])
    same = random_state(12)
    other = {**random_state(12), "param": same["param"]}
    with pytest.raises(ValueError, match="param overlaps the param of another update"):
        _C.adamw_(_C.Workers(1), [update(same, random_grad(12)), update(other, random_grad(12))])


def test_values_laid_out_in_another_order_are_refused() -> None:
    state = {key: value.view(3, 4) for key, value in random_state(12).items()}
    turned = random_grad(12).view(4, 3).t()
    with pytest.raises(ValueError, match="grad has strides"):
        _C.adamw_(_C.Workers(1), [update(state, turned)])
    with pytest.raises(ValueError, match="exp_avg has strides"):
        _C.adamw_(_C.Workers(1), [update({**state, "exp_avg": turned}, random_grad(12).view(3, 4))])


def test_autograd_is_told_of_what_was_written() -> None:
    state, grad = random_state(12), random_grad(12)
    half, step = state["param"].bfloat16(), torch.tensor(2.0)
    written = [state["param"], state["exp_avg"], state["exp_avg_sq"], half, step]
    before = [tensor._version for tensor in (*written, grad)]
    _C.adamw_(_C.Workers(1), [update(state, grad, step, half=half)])
    after = [tensor._version for tensor in (*written, grad)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [True] * 5 + [False]


def test_a_bad_destination_is_named_and_nothing_is_written() -> None:
    def attempt(out: tuple[Tensor, ...], half: Tensor | None = None) -> None:
        _C.adamw_(_C.Workers(1), [update(state, random_grad(12), half=half)], out=[out])

    state = random_state(12)
    one, two, shared = torch.zeros(12), torch.zeros(12), torch.zeros(20)
    half = state["param"].bfloat16()
    with pytest.raises(ValueError, match="param is Half, expected the dtype of the old values"):
        attempt((torch.zeros(12).half(), one, two))
    with pytest.raises(ValueError, match="half is Half, expected the dtype of the old values"):
        attempt((torch.zeros(12), one, two, one, torch.zeros(12).half()), half)
    with pytest.raises(ValueError, match=r"exp_avg has shape \[11\], expected param's \[12\]"):
        attempt((one, torch.zeros(11), two))
    with pytest.raises(ValueError, match="overlaps"):
        attempt((shared[:12], shared[8:], one))
    with pytest.raises(ValueError, match="overlaps"):
        attempt((one, state["exp_avg_sq"], two))  # an old value that is still to be read
    second = random_state(12)
    updates = [update(each, random_grad(12)) for each in (state, second)]
    new = [torch.zeros(12) for _ in range(5)]
    with pytest.raises(ValueError, match="exp_avg overlaps the param of another update"):
        _C.adamw_(_C.Workers(1), updates, out=[(second["exp_avg"], *new[:2]), tuple(new[2:])])
    assert same_bits(state, random_state(12))
    assert same_bits(second, random_state(12))


@pytest.mark.parametrize("num_workers", [1, 4])
def test_tensors_of_one_call_are_each_updated_once_whatever_sizes_follow_each_other(
    num_workers: int,
) -> None:
    sizes = [1, TILE - 1, 1, 0, TILE, 5, TILE + 1, 2 * TILE + 3, 64, 10_000, 10_000, 10_000, 10_000]
    states = [random_state(size, seed) for seed, size in enumerate(sizes)]
    grads = [random_grad(size, seed) for seed, size in enumerate(sizes)]
    alone = [{key: value.clone() for key, value in state.items()} for state in states]
    together = [update(state, grad) for state, grad in zip(states, grads, strict=True)]
    stats = _C.adamw_(_C.Workers(num_workers), together)
    norms = 0.0
    for state, grad, expected in zip(states, grads, alone, strict=True):
        norms += _C.adamw_(_C.Workers(1), [update(expected, grad)]).grad_sq_norm
        for key, value in expected.items():
            assert torch.equal(state[key], value), (key, value.numel())
    assert stats.grad_sq_norm == pytest.approx(norms, rel=1e-12)
