"""The hash of gradients: a plain Python one is the oracle, and any change has to show."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autohete import _C

LEVELS = _C.cpu_features()["supported"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 128
TILE = 128 * 256
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
WORKERS = _C.Workers(2)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


KEYS = [mix((i + 1) * STEP & MASK) for i in range(BLOCK)]


def reference(tensors: list[Tensor]) -> int:
    """Return the hash as csrc/kernels/content_hash.h defines it, one word at a time."""
    sums, position = [0, 0], 0
    for tensor in tensors:
        item = tensor.element_size()
        data = (
            bytes(tensor.detach().contiguous().view(torch.uint8).tolist()) if len(tensor) else b""
        )
        for at in range(0, len(data), BLOCK * item):
            block = data[at : at + BLOCK * item]
            words = struct.unpack(f"<{BLOCK * item // 4}I", block.ljust(BLOCK * item, b"\0"))
            half = len(words) // 2
            end = position + (at + len(block)) // item
            for lane in range(2):
                keys = [key >> (32 * lane) & 0xFFFFFFFF for key in KEYS]
                digest = sum(
                    (words[j] + keys[j] & 0xFFFFFFFF)
                    * (words[j + half] + keys[j + half] & 0xFFFFFFFF)
                    for j in range(half)
                )
                sums[lane] = sums[lane] + mix(digest + end * STEP & MASK) & MASK
        position += -(-tensor.numel() // BLOCK) * BLOCK
    return sums[1] << 64 | sums[0]


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=rng).to(dtype)


def content_hash(*tensors: Tensor, level: str | None = None) -> int:
    return _C.content_hash(WORKERS, list(tensors), level=level)


def integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_gives_the_hash_of_the_definition(level: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 1000, 4097):
        assert content_hash(values(numel, dtype), level=level) == reference([values(numel, dtype)])
    several = [values(n, dtype, seed=n) for n in (5, 0, 128, 300, 1)]
    assert content_hash(*several, level=level) == reference(several)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_the_place_in_memory_and_cuts_at_blocks_do_not_change_it(
    dtype: torch.dtype,
) -> None:
    numel = 2 * TILE + 777
    given = values(numel, dtype)
    expected = content_hash(given, level="scalar")
    for num_workers in (1, 3, 8):
        for level in LEVELS:
            assert _C.content_hash(_C.Workers(num_workers), [given], level=level) == expected
    for shift in (1, 3, 7):
        moved = torch.empty(numel + 8, dtype=dtype)[shift : shift + numel].copy_(given)
        assert content_hash(moved) == expected
    rng = random.Random(0)
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, numel // BLOCK), 4))
        bounds = [0, *(cut * BLOCK for cut in cuts), numel]
        pieces = [given[a:b] for a, b in itertools.pairwise(bounds)]
        assert content_hash(*pieces) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_of_place", [False, True])
def test_the_update_reports_the_hash_and_the_norm_of_its_gradients(
    level: str, dtype: torch.dtype, out_of_place: bool
) -> None:
    sizes = (3, 200, TILE + 77, 0, 128)
    grads = [values(n, dtype, seed=n) for n in sizes]
    hyper = _C.AdamHyper(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, grad_scale=0.3
    )
    updates, out = [], []
    for grad in grads:
        state = [torch.ones(len(grad)) for _ in range(3)]
        updates.append((hyper, 2.0, grad, *state, None, None))
        out.append(tuple(torch.empty(len(grad)) for _ in range(3)))
    there = out if out_of_place else None
    stats = _C.adamw_(WORKERS, updates, out=there, level=level)
    alone = _C.gradient_stats(WORKERS, grads, level=level)
    assert stats.grad_hash == alone.grad_hash == content_hash(*grads)
    assert stats.grad_sq_norm == alone.grad_sq_norm
    assert stats.grad_sq_norm == pytest.approx(sum(float((g.double() ** 2).sum()) for g in grads))
    assert not stats.non_finite and not alone.non_finite
    grads[2][TILE] = float("nan")
    assert _C.gradient_stats(WORKERS, grads, level=level).non_finite
    without = _C.adamw_(WORKERS, updates, out=there, level=level, by_products=False)
    assert (without.grad_sq_norm, without.grad_hash, without.non_finite) == (0.0, 0, False)


def negate(t: Tensor) -> None:
    t.neg_()


def negate_one(t: Tensor) -> None:
    t[len(t) // 3].neg_()


def negate_every_other(t: Tensor) -> None:
    t[::2].neg_()


def scale(t: Tensor) -> None:
    t.mul_(0.5)


def reverse(t: Tensor) -> None:
    t.copy_(t.flip(0).clone())


def rotate(t: Tensor) -> None:
    t.copy_(t.roll(1))


def rotate_by_a_block(t: Tensor) -> None:
    t.copy_(t.roll(BLOCK))


def swap_neighbours(t: Tensor) -> None:
    t[:2] = t[:2].flip(0).clone()


def swap_the_words_of_a_pair(t: Tensor) -> None:
    half = BLOCK // 2
    t[[0, half]] = t[[half, 0]]


def swap_two_blocks(t: Tensor) -> None:
    first = t[:BLOCK].clone()
    t[:BLOCK] = t[BLOCK : 2 * BLOCK]
    t[BLOCK : 2 * BLOCK] = first


def shuffle(t: Tensor) -> None:
    t.copy_(t[torch.randperm(len(t), generator=torch.Generator().manual_seed(1))])


def zero_one(t: Tensor) -> None:
    t[-1] = 0


def clip(t: Tensor) -> None:
    t.clamp_(-1, 1)


CHANGES: list[Callable[[Tensor], None]] = [
    negate, negate_one, negate_every_other, scale, reverse, rotate, rotate_by_a_block,
    swap_neighbours, swap_the_words_of_a_pair, swap_two_blocks, shuffle, zero_one, clip,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [2 * BLOCK, 1000, TILE + 5])
def test_a_change_shows_in_both_halves_of_the_hash(
    change: Callable[[Tensor], None], dtype: torch.dtype, numel: int
) -> None:
    given = values(numel, dtype)
    changed = given.clone()
    change(changed)
    assert not torch.equal(given, changed)
    before, after = content_hash(given), content_hash(changed)
    assert before & MASK != after & MASK
    assert before >> 64 != after >> 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_that_keeps_linear_checksums_shows(dtype: torch.dtype) -> None:
    given = values(1000, dtype)
    x, y = given[0].clone(), given[1].clone()
    given[[0, 1, 4, 5]] = torch.stack([x, y, y, x])
    changed = given.clone()
    changed[[0, 1, 4, 5]] = torch.stack([y, x, x, y])  # sums of values and of places x values stay
    assert not torch.equal(given, changed)
    assert content_hash(given) != content_hash(changed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_zero_and_the_bits_of_a_nan_show(dtype: torch.dtype) -> None:
    zero = torch.zeros(300, dtype=dtype)
    minus = zero.clone()
    minus[17] = -0.0
    assert torch.equal(zero, minus) and content_hash(zero) != content_hash(minus)
    quiet = torch.full((300,), float("nan"), dtype=dtype)
    other = quiet.clone()
    integers(other)[299] ^= 1
    assert content_hash(quiet) != content_hash(other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [None, 0.0, 1.0])
def test_every_single_bit_shows(dtype: torch.dtype, constant: float | None) -> None:
    numel = 3 * BLOCK + 5
    given = values(numel, dtype) if constant is None else torch.full((numel,), constant).to(dtype)
    bits = 8 * given.element_size()
    seen_low, seen_high = set(), set()
    for place in range(numel):
        for bit in range(0, bits, 3):
            changed = given.clone()
            integers(changed)[place] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
            found = content_hash(changed)
            seen_low.add(found & MASK)
            seen_high.add(found >> 64)
    expected = content_hash(given)
    flips = numel * len(range(0, bits, 3))
    assert len(seen_low) == len(seen_high) == flips  # each differs from every other one too
    assert expected & MASK not in seen_low and expected >> 64 not in seen_high


def test_random_bits_anywhere_in_a_large_tensor_show() -> None:
    rng = random.Random(0)
    for dtype in DTYPES:
        given = values(3 * TILE + 5, dtype)
        bits = 8 * given.element_size()
        hashes = {content_hash(given)}
        for _ in range(200):
            place, bit = rng.randrange(len(given)), rng.randrange(bits - 1)
            integers(given)[place] ^= 1 << bit  # kept: each state differs from all before
            hashes.add(content_hash(given))
        assert len(hashes) == 201


def test_pairs_of_sign_flips_never_cancel() -> None:
    given = values(BLOCK)
    seen = set()
    for i in range(BLOCK):
        for j in range(i):
            changed = given.clone()
            changed[[i, j]] *= -1
            seen.add(content_hash(changed) & MASK)
    assert len(seen) == BLOCK * (BLOCK - 1) // 2


def test_which_tensor_holds_what_and_where_one_ends_shows() -> None:
    a, b = values(500, seed=1), values(500, seed=2)
    hashes = {
        content_hash(a, b), content_hash(b, a), content_hash(torch.cat([a, b])), content_hash(a),
        content_hash(a[:-1]), content_hash(a[:-1], a[-1:]), content_hash(a, a), content_hash(b, b),
        content_hash(torch.zeros(1)), content_hash(torch.zeros(2)), content_hash(),
        content_hash(torch.zeros(128)), content_hash(torch.zeros(129)),
    }  # fmt: skip
    assert len(hashes) == 13


def test_about_half_of_the_bits_of_the_hash_follow_a_change() -> None:
    given = values(1000)
    before = content_hash(given)
    turned = []
    for place in range(500):
        changed = given.clone()
        integers(changed)[place] ^= 1
        turned.append((before ^ content_hash(changed)).bit_count())
    assert 62 < sum(turned) / len(turned) < 66
    assert min(turned) > 32


def test_what_it_cannot_read_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"content_hash: tensors is \[2, 1\], expected dense"):
        content_hash(torch.zeros(4, 2)[:, :1])
    with pytest.raises(ValueError, match="tensors is Long, expected float32"):
        content_hash(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        ValueError, match="gradient_stats: tensors is <class .int.>, expected a tensor"
    ):
        _C.gradient_stats(WORKERS, [1])
