"""Inputs of changing size: plans follow them, gpu_mem holds, and no bit changes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, assert_bit_equal, train

from autohete import AutoHeteWrapper
from autohete.planning import ActivationRule


def lengths_of(seed: int, low: int, high: int, steps: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(low, high) for _ in range(steps)]


def loop(lengths, model, optimizer, step, micro_batches=1):
    total = 0.0
    for micro in range(micro_batches):
        index = step * micro_batches + micro
        loss = model(*batch(index, length=lengths[index]))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def watched(lengths, peaks, model, optimizer, step, micro_batches=1):
    model.run.side.reset_peak()
    loss = loop(lengths, model, optimizer, step, micro_batches)
    peaks.append(model.run.side.peak())
    return loss


def need_of(length: int, gpt: dict[str, Any]) -> int:
    """What keeping everything on the device takes at that length, measured."""
    model = make_gpt(**gpt)
    optimizer = adamw(model)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="8GiB", profile_path=None).to("cpu")
    for step in range(2):
        loop([length] * 2, trained, optimizer, step)
    assert all(u.optimizer_state.name == "DEVICE" for u in trained.plan.units)
    peak = trained.report().device_peak_measured_bytes
    trained.unwrap()
    return peak


def compare(gpt: dict[str, Any], lengths: list[int], share: float, micro_batches: int = 1) -> Any:
    """Train on these lengths within `share` of the longest one's need; return the report."""
    steps, peaks = len(lengths) // micro_batches, []
    gpu_mem = int(share * need_of(max(lengths), gpt))
    build = partial(make_gpt, **gpt)
    plain = train(
        wrap=None, steps=steps, build=build,
        loop=partial(loop, lengths, micro_batches=micro_batches),
    )  # fmt: skip
    ours = train(
        wrap={"gpu_mem": gpu_mem, "gradient_accumulation_steps": micro_batches}, steps=steps,
        build=build, loop=partial(watched, lengths, peaks, micro_batches=micro_batches),
    )  # fmt: skip
    assert_bit_equal(ours, plain)
    assert max(peaks) <= gpu_mem
    return ours.extra["report"]


@pytest.mark.parametrize(("seed", "share"), [(0, 0.45), (1, 0.8)])
def test_random_lengths_keep_within_gpu_mem_and_no_bit_changes(seed, share):
    report = compare({"length": 64, "layers": 4}, lengths_of(seed, 4, 64, 24), share)
    assert 1 <= report.num_replans < 15
    assert report.replan_seconds > 0


def test_larger_inputs_in_the_middle_of_an_accumulated_step():
    report = compare({"length": 64, "layers": 4}, lengths_of(0, 4, 64, 24), 0.6, micro_batches=3)
    assert report.num_replans >= 1


def test_tied_weights_under_changing_lengths():
    compare({"length": 64, "layers": 3, "tied": True, "vocab": 400}, lengths_of(5, 4, 64, 20), 0.7)


def test_equal_sizes_are_planned_for_once():
    report = compare({"length": 32}, [32] * 8, 0.6)
    assert report.num_replans == 0


def test_sizes_that_were_covered_are_not_measured_again():
    report = compare({"length": 32}, [32, 8, 16, 31, 4, 32, 17], 0.6)
    assert report.num_replans == 0


def test_short_inputs_recompute_less_than_the_longest():
    lengths = [8, 64, 64, 8, 64]
    recomputed = []

    def looked_at(model, optimizer, step):
        loss = loop(lengths, model, optimizer, step)
        rules = [placed.activations for placed in model.run.plans.placements]
        recomputed.append(rules.count(ActivationRule.RECOMPUTE))
        return loss

    gpt = {"length": 64, "layers": 6}
    gpu_mem = int(0.5 * need_of(64, gpt))
    train(wrap={"gpu_mem": gpu_mem}, steps=5, build=partial(make_gpt, **gpt), loop=looked_at)
    assert recomputed[0] == recomputed[1] == 6, "both sizes are measured"
    assert recomputed[3] < recomputed[2] == recomputed[4]


class WantsMore:
    """A forward hook that once asks for more memory than there is."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: Any) -> None:
        if not self.asked:
            self.asked = True
            torch.zeros(1 << 20)


def test_after_memory_ran_out_the_next_step_is_planned_with_more_to_spare():
    model = make_gpt(layers=3)
    optimizer = adamw(model)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="700KiB", profile_path=None).to("cpu")
    for step in range(3):
        loop([16] * 8, trained, optimizer, step)
    room = trained.run.plans._plannable()
    assert trained.plan.device_peak_bytes <= room
    model.norm.register_forward_hook(wants_more := WantsMore())
    with pytest.raises(torch.OutOfMemoryError):
        trained(*batch(3))
    assert wants_more.asked
    for step in range(3, 6):
        loop([16] * 8, trained, optimizer, step)
    assert trained.report().num_replans == 1
    # Times are measured, so which of the plans that fit is the fastest is not always the same.
    assert trained.run.plans._plannable() < 0.96 * room
    assert trained.plan.device_peak_bytes <= trained.run.plans._plannable()
    trained.unwrap()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_lengths_from_128_to_2048_in_one_run():
    gpt = {"length": 2048, "layers": 4, "width": 64, "vocab": 512}
    lengths = lengths_of(0, 128, 2048, 24)
    report = compare(gpt, lengths, 0.5)
    print(f"{report.num_replans} plans for larger inputs, {report.replan_seconds:.3f} s in all")
    assert report.num_replans <= 10
