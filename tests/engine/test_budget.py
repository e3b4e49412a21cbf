"""Device memory: never past gpu_mem, refused in words, and usable after a refusal."""

from __future__ import annotations

import random
import re
from functools import cache, partial

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, train

from autohete import AutoHeteWrapper
from autohete.planning import format_bytes, minimum_gpu_mem, parse_bytes

MODELS = {
    "plain": partial(make_gpt, layers=3),
    "wide": partial(make_gpt, layers=2, width=64),
    "deep": partial(make_gpt, layers=6, width=16, tied=True),
}
STEPS = 4


def loop(rows, model, optimizer, step):
    loss = model(*batch(step, rows=rows))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@cache
def plain(name: str, rows: int) -> Result:
    return train(wrap=None, steps=STEPS, build=MODELS[name], loop=partial(loop, rows))


def attempt(name: str, rows: int, gpu_mem: int) -> Result | None:
    """Train within gpu_mem; None when the budget was refused, in words."""
    peaks: list[int] = []

    def watched(model, optimizer, step):
        model.run.side.reset_peak()
        loss = loop(rows, model, optimizer, step)
        peaks.append(model.run.side.peak())
        return loss

    try:
        result = train(wrap={"gpu_mem": gpu_mem}, steps=STEPS, build=MODELS[name], loop=watched)
    except (ValueError, torch.OutOfMemoryError) as refusal:
        if "gpu_mem" not in str(refusal):
            raise
        assert all(peak <= gpu_mem for peak in peaks)
        return None
    assert max(peaks) <= gpu_mem
    return result


@cache
def smallest(name: str, rows: int) -> int:
    """The smallest gpu_mem that trains, to 16 KiB."""
    low, high = 0, parse_bytes("8MiB", "gpu_mem")
    while high - low > 16 << 10:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(name, rows, middle) else (middle, high)
    return high


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_stays_within_random_tight_budgets_and_no_bit_changes(name, rows):
    base = smallest(name, rows)
    chance = random.Random(f"{name}{rows}")
    budgets = [base, *(int(base * chance.uniform(1.5, 2.2)) for _ in range(3))]
    results = [attempt(name, rows, gpu_mem) for gpu_mem in budgets]
    trained = [result for result in results if result is not None]
    # How many gradients wait at once depends on the link's timing: at the very edge one run fits
    # and the next is refused, in words.
    assert len(trained) >= 3, budgets
    for result in trained:
        assert_bit_equal(result, plain(name, rows))


def wrapped(gpu_mem, **keywords):
    model = make_gpt(layers=3)
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem=gpu_mem, cpu_mem="64MiB", profile_path=None, **keywords
    )
    return trained.to("cpu"), optimizer


def test_an_allocation_past_the_budget_says_what_was_left_and_what_would_fit():
    trained, optimizer = wrapped("700KiB")
    with pytest.raises(torch.OutOfMemoryError) as refused:
        loop(64, trained, optimizer, 0)
    text = str(refused.value)
    size = r"[\d.]+ [KM]?i?B"
    assert re.search(rf"asked for {size}, {size} of 700 KiB gpu_mem were left", text)
    written, least = re.search(rf"at least ({size}) \(gpu_mem=(\d+)\)", text).groups()
    least = int(least)
    assert written == format_bytes(least)
    assert least > parse_bytes("700KiB", "gpu_mem")
    assert "smaller batch" in text
    trained.unwrap()


def test_after_planning_the_advice_names_the_smallest_gpu_mem_of_the_measured_profile():
    trained, optimizer = wrapped("700KiB")
    for step in range(2):
        loop(3, trained, optimizer, step)
    least = minimum_gpu_mem(trained.run.profile, trained.run.cpu_mem, window=2)
    trained(*batch(2, rows=3))
    with pytest.raises(torch.OutOfMemoryError, match=rf"gpu_mem={least}\)"):
        torch.zeros(1 << 20)  # where the loss would be
    trained.unwrap()


def test_inputs_that_no_plan_can_hold_are_refused_before_anything_is_computed():
    trained, optimizer = wrapped("700KiB")
    for step in range(2):
        loop(3, trained, optimizer, step)
    trained.run.side.reset_peak()
    before = trained.run.side.peak()
    with pytest.raises(torch.OutOfMemoryError, match="nothing was computed yet") as refused:
        loop(64, trained, optimizer, 2)
    assert trained.run.side.peak() == before
    needed = int(re.search(r"gpu_mem=(\d+)\)", str(refused.value))[1])
    trained.unwrap()
    roomy, optimizer = wrapped(needed * 2)
    loop(64, roomy, optimizer, 0)
    roomy.unwrap()


@pytest.mark.parametrize("when", [0, 2])
def test_after_a_refusal_a_smaller_batch_trains_to_the_bits_of_plain_training(when):
    def run(wrap_it):
        if wrap_it:
            trained, optimizer = wrapped("700KiB")
        else:
            trained = make_gpt(layers=3)
            optimizer = adamw(trained)
        losses = []
        for step in range(5):
            if step == when and wrap_it:
                for _ in range(2):
                    with pytest.raises(torch.OutOfMemoryError):
                        loop(64, trained, optimizer, step)
                    optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(loop(3, trained, optimizer, step))
        if wrap_it:
            assert trained.run.side.peak() <= trained.run.gpu_mem
            trained.unwrap()
        return Result(losses, trained.module if wrap_it else trained, optimizer)

    assert_bit_equal(run(True), run(False))


def test_memory_outside_forward_and_backward_is_not_the_devices():
    trained, optimizer = wrapped("700KiB")
    loop(3, trained, optimizer, 0)
    torch.zeros(1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        loop(64, trained, optimizer, 0)
    torch.zeros(1 << 20)
    trained.unwrap()
    torch.zeros(1 << 20)
