"""What a run's profile takes from later steps: seconds, and a plan that suits them better."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, assert_bit_equal, plain_loop, train

from autohete import AutoHeteWrapper
from autohete._C import CopyDirection
from autohete.planning import ActivationRule
from autohete.run import Run
from autohete.run_plan import RunPlan
from autohete.warm_steps import WarmStep, WarmSteps

SLOW = 0.03  # seconds that a layer takes longer in a first step
# The first step, some under its plan, and those that are timed.
UNTIL_TIMED = 1 + WarmSteps.SETTLING + WarmSteps.NUM


def slow_at_first(model: torch.nn.Module) -> dict[str, float]:
    """Let the layers take longer until `seconds` is 0: as where kernels are loaded."""
    more = {"seconds": SLOW}

    def slowed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(more["seconds"])
            return forward(*args)

        return run

    for block in model.blocks:
        block.forward = slowed(block.forward)
    return more


def wrapped(**keywords: Any) -> tuple[torch.nn.Module, Any, AutoHeteWrapper, dict[str, float]]:
    model = make_gpt()
    more = slow_at_first(model)
    optimizer = adamw(model)
    keywords = {"gpu_mem": "64MiB", "profile_path": None, **keywords}
    return model, optimizer, AutoHeteWrapper(model, optimizer, **keywords).to("cpu"), more


def one_step(trained: torch.nn.Module, optimizer: Any, step: int, passes: int = 1) -> None:
    for index in range(passes):
        trained(*batch(passes * step + index)).backward()
    optimizer.step()
    optimizer.zero_grad()


def layers_of(trained: AutoHeteWrapper) -> list[Any]:
    return [unit for unit in trained.run.profile.units if "blocks" in unit.name]


def layer_seconds(trained: AutoHeteWrapper) -> list[float]:
    return [unit.forward_seconds for unit in layers_of(trained)]


@pytest.mark.parametrize("passes", [1, 2])
def test_the_seconds_of_a_slow_first_step_do_not_stay(passes):
    _, optimizer, trained, more = wrapped(gradient_accumulation_steps=passes)
    for step in range(UNTIL_TIMED + 1):
        one_step(trained, optimizer, step, passes)
        more["seconds"] = 0.0
        if step == 1:
            assert min(layer_seconds(trained)) >= SLOW
            before = trained.report().step_seconds_predicted
    assert max(layer_seconds(trained)) < SLOW / 2
    saved = (len(layer_seconds(trained)) - 0.5) * SLOW * passes
    assert trained.report().step_seconds_predicted < before - saved
    assert trained.report().num_replans == 0
    trained.unwrap()


def test_step_itself_is_part_of_what_is_expected():
    _, optimizer, trained, more = wrapped()
    more["seconds"] = 0.0
    slow = trained.run.bridge.commit

    def commit() -> Any:
        time.sleep(SLOW)
        return slow()

    trained.run.bridge.commit = commit
    for step in range(UNTIL_TIMED + 1):
        one_step(trained, optimizer, step)
    assert trained.run.profile.loop_seconds > SLOW
    assert trained.report().step_seconds_predicted > SLOW
    trained.unwrap()


def test_waits_are_no_compute():
    """Of a first step, in which everything comes up a slow link."""
    _, optimizer, trained, more = wrapped()
    more["seconds"] = 0.0
    for way in (CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_HOST):
        trained.run.side.machine.set_link(way, 1e9, latency_seconds=SLOW)
    for step in range(2):
        one_step(trained, optimizer, step)
    assert trained.report().wait_upload_seconds > SLOW
    for unit in layers_of(trained):
        assert 0 < unit.forward_seconds < SLOW
        assert 0 < unit.backward_seconds < SLOW
    trained.unwrap()


def test_a_plan_that_suits_later_steps_better_is_gone_over_to():
    """Where compute was slow, a slow link was hidden; later it is not, and layers recompute."""
    delays: list[dict[str, float]] = []

    def build():
        model = make_gpt(layers=6, width=64, length=64)
        delays.append(slow_at_first(model))
        return model

    def slow_links(trained):
        for way in (CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_HOST):
            trained.run.side.machine.set_link(way, 20e6)

    recomputed = []

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        delays[-1]["seconds"] = 0.0
        if plan := getattr(model, "plan", None):
            recomputed.append(sum(u.activations == ActivationRule.RECOMPUTE for u in plan.units))
        return loss

    common = {"steps": UNTIL_TIMED + 4, "build": build, "loop": loop}
    plain = train(wrap=None, **common)
    ours = train(wrap={"gpu_mem": "2900KiB"}, prepare=slow_links, **common)
    assert_bit_equal(ours, plain)
    assert ours.extra["report"].num_replans == 1
    assert recomputed[1] < recomputed[-1]


def two_forwards(model, optimizer, step):
    losses = [model(*batch(2 * step + index)) for index in range(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.item() for loss in losses)


class LeftError(Exception):
    pass


def left_by_exceptions(model, optimizer, step):
    if step >= 2:  # in the middle of what would be timed, forward and backward in turn
        logits = model(*batch(step + 100))
        if step % 2:

            def stop(_):
                raise LeftError

            logits.register_hook(stop)
            with pytest.raises(LeftError):
                logits.backward()
        optimizer.zero_grad()
    return plain_loop(model, optimizer, step)


def evaluated_in_between(model, optimizer, step):
    model(*batch(step))  # with a graph that nobody goes back through
    with torch.no_grad():
        model(*batch(step + 1))
    return plain_loop(model, optimizer, step)


def without_a_step(model, optimizer, step):
    model(*batch(step)).backward()
    if step % 3 == 0:
        optimizer.zero_grad()
        return 0.0
    optimizer.step()
    optimizer.zero_grad()
    return 0.0


@pytest.mark.parametrize(
    "loop", [two_forwards, left_by_exceptions, evaluated_in_between, without_a_step]
)
def test_loops_whose_steps_are_not_one_pass_each_train_as_before(loop):
    common = {"steps": 2 * UNTIL_TIMED, "loop": loop}
    plain = train(wrap=None, **common)
    ours = train(wrap={"gpu_mem": "2MiB"}, **common)
    assert_bit_equal(ours, plain)
    assert ours.extra["report"].step_seconds_predicted > 0


def test_larger_inputs_behind_a_timed_forward_change_the_plan_at_rest(monkeypatch):
    """The forward was left without a backward, so its step is being timed still."""
    open_changes, seen = [], []
    change, measure_next = Run._change_plan, RunPlan.measure_next

    def at_rest(run, what):
        open_changes.append(what)
        change(run, what)
        open_changes.pop()

    def watched(plans, size):
        seen.append(bool(open_changes))
        measure_next(plans, size)

    monkeypatch.setattr(Run, "_change_plan", at_rest)
    monkeypatch.setattr(RunPlan, "measure_next", watched)
    _, optimizer, trained, more = wrapped()
    more["seconds"] = 0.0
    for step in range(UNTIL_TIMED - 2):
        one_step(trained, optimizer, step)
    trained(*batch(100))
    assert isinstance(trained.run.plans.measuring(), WarmStep)
    seen.clear()
    trained(*batch(101, rows=6)).backward()
    assert seen == [True]
    trained.unwrap()


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_add_up_without_being_stated_have_their_room(passes):
    """gradient_accumulation_steps is 1; zero_grad() comes before the plan is made."""
    _, optimizer, trained, more = wrapped()
    more["seconds"] = 0.0
    for step in range(2):
        one_step(trained, optimizer, step, passes)
    assert trained.run.plans.profile.gradients_persist == (passes > 1)
    trained.unwrap()
