"""Casts, copies and the squared norm: torch's own conversions are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autohete import _C

LEVELS = _C.cpu_features()["supported"]
HALVES = [torch.bfloat16, torch.float16]
INT = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INT[tensor.dtype])


def assert_same(got: Tensor, want: Tensor) -> None:
    """Compare bits; any NaN equals any NaN, its payload is not promised."""
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_floats(dtype: torch.dtype) -> Tensor:
    """Return every half value, the ties between neighbours, and one bit to either side of both."""
    values = every_half(dtype).float().view(torch.int32)
    half_step = 1 << (15 if dtype == torch.bfloat16 else 12)
    near = [values + offset for offset in (-1, 0, 1, half_step - 1, half_step, half_step + 1)]
    subnormal_ties = (torch.arange(0, 2048) * 2.0**-25).view(torch.int32)
    edges = torch.tensor([65504.0, 65519.996, 65520.0, 65536.0, 70000.0, 3.4e38, 1 + 2**-8, 1e-45])
    rng = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (200_000,), generator=rng).to(torch.int32)
    parts = [*near, subnormal_ties, subnormal_ties + 1, edges.view(torch.int32), anything]
    return torch.cat(parts).view(torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_is_to_nearest_even_for_every_tie_edge_and_subnormal(
    level: str, dtype: torch.dtype
) -> None:
    values = hard_floats(dtype)
    got = torch.empty_like(values, dtype=dtype)
    _C.cast_(_C.Workers(2), got, values, level=level)
    assert_same(got, values.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_value_widens_exactly(level: str, dtype: torch.dtype) -> None:
    values = every_half(dtype)
    got = torch.empty_like(values, dtype=torch.float32)
    _C.cast_(_C.Workers(2), got, values, level=level)
    assert_same(got, values.float())


@pytest.mark.parametrize(("src", "dst"), [HALVES, HALVES[::-1]])
def test_between_the_halves_goes_through_fp32(src: torch.dtype, dst: torch.dtype) -> None:
    values = every_half(src)
    got = torch.empty_like(values, dtype=dst)
    _C.cast_(_C.Workers(2), got, values)
    assert_same(got, values.float().to(dst))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("numel", [0, 1, 17, 255, 256, 257, 32767, 32769, 100_003])
def test_casts_of_any_length_touch_nothing_else(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel + 1)[1:]
    storage = torch.full((numel + 40,), 7.0, dtype=dtype)
    _C.cast_(_C.Workers(2), storage[21 : 21 + numel], values)
    assert_same(storage[21 : 21 + numel], values.to(dtype))
    assert (storage[:21] == 7).all() and (storage[21 + numel :] == 7).all()


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 2**18 - 1, 2**20 + 3, 17 * 2**20 + 5])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_copies_of_any_length_and_alignment_touch_nothing_else(numel: int, shift: int) -> None:
    src = torch.arange(numel + shift, dtype=torch.int64).to(torch.uint8)[shift:]
    storage = torch.full((numel + 200,), 77, dtype=torch.uint8)
    inside = slice(100 - shift, 100 - shift + numel)
    _C.copy_(_C.Workers(2), storage[inside], src)
    assert torch.equal(storage[inside], src)
    assert (storage[: inside.start] == 77).all() and (storage[inside.stop :] == 77).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("numel", [0, 1, 255, 257, 32768, 100_003])
def test_the_squared_norm_is_float64s_at_every_level_and_thread_count(
    numel: int, dtype: torch.dtype
) -> None:
    values = torch.randn(numel).to(dtype)
    exact = float((values.double() ** 2).sum())
    first = _C.squared_norm(_C.Workers(1), values, level="scalar").grad_sq_norm
    assert first == pytest.approx(exact, rel=1e-14, abs=0)
    for level in LEVELS:
        for num_workers in (1, 2, 5):
            stats = _C.squared_norm(_C.Workers(num_workers), values, level=level)
            assert stats.grad_sq_norm == first
            assert not stats.non_finite


def test_the_squared_norm_does_not_lose_small_values_beside_large_ones() -> None:
    values = torch.full((1_000_001,), 1e-4)
    values[0] = 1e4
    got = _C.squared_norm(_C.Workers(2), values).grad_sq_norm
    assert got == pytest.approx(float((values.double() ** 2).sum()), rel=1e-14)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_squared_norm_reports_a_non_finite_value(value: float) -> None:
    values = torch.zeros(40_000)
    values[39_999] = value
    assert _C.squared_norm(_C.Workers(2), values).non_finite


def test_wrong_arguments_are_named() -> None:
    workers, x = _C.Workers(1), torch.zeros(8)
    with pytest.raises(ValueError, match="cast_: dst is Double, expected float32"):
        _C.cast_(workers, x.double(), x)
    with pytest.raises(ValueError, match=r"cast_: src has shape \[4\], expected dst's \[8\]"):
        _C.cast_(workers, x, x[:4])
    with pytest.raises(ValueError, match="copy_: dst overlaps src"):
        _C.copy_(workers, x[:6], x[2:])
    with pytest.raises(ValueError, match="copy_: src is BFloat16, expected dst's dtype"):
        _C.copy_(workers, x, x.bfloat16())
    with pytest.raises(ValueError, match="squared_norm: values has|dense strides"):
        _C.squared_norm(workers, torch.zeros(1).expand(4))
    with pytest.raises(ValueError, match="level is 'sse9', expected scalar, avx2 or avx512"):
        _C.squared_norm(workers, x, level="sse9")
