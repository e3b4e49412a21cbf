"""An optimizer made after wrapping trains right, and is told of; other loops are not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, plain_loop
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.other_optimizers import _WATCHING

KEYWORDS: dict[str, Any] = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}


def wrapped(**keywords: Any) -> tuple[Any, Any, Optimizer]:
    """The wrapper, the model in it, and the optimizer it was wrapped with."""
    model = make_gpt(dropout=0.0, layers=2)
    optimizer = adamw(model)
    return AutoHeteWrapper(model, optimizer, **KEYWORDS, **keywords).to("cpu"), model, optimizer


def told(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [w for w in caught if "trains this model" in str(w.message)]


@contextmanager
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize("kind", [AdamW, SGD, CPUAdamW])
@pytest.mark.parametrize("made", ["before the first forward", "after it"])
def test_an_optimizer_made_after_wrapping_trains_right_and_is_told_of_once(kind, made):
    def train(model: nn.Module, steps: range, optimizer: Optimizer) -> list[float]:
        return [plain_loop(model, optimizer, step) for step in steps]

    plain = make_gpt(dropout=0.0, layers=2)
    reference = kind(plain.parameters(), lr=0.01)
    expected = train(plain, range(6), reference)

    trained, model, _ = wrapped()
    if made == "after it":
        trained(*batch(0))
    other = kind(trained.parameters(), lr=0.01)
    with caught() as found:
        losses = train(trained, range(6), other)
    (warning,) = told(found)
    assert str(warning.message).startswith(f"autohete: {kind.__name__}.step() trains this model")
    assert "the CPUAdamW that it was wrapped with" in str(warning.message)
    assert "make the optimizer first" in str(warning.message)
    assert warning.filename.endswith("oracle.py"), "where step() is called"
    trained.unwrap()
    assert_bit_equal(Result(losses, model, other), Result(expected, plain, reference))


# ------------------------------------------------------------ loops in which nothing is wrong


class Lookahead(Optimizer):
    """Steps the inner one, and every second time goes back half the way."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class EveryFourth(Optimizer):
    """Accumulates: passes every fourth step on."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.count = inner, 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        if self.count % 4 == 0:
            self.inner.step()
            self.inner.zero_grad()


class SAM(Optimizer):
    """Sharpness-aware: climbs, asks for a second gradient there, and steps from where it was."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner = inner

    @torch.no_grad()
    def climb(self) -> None:
        self.before = [p.clone() for p in self.param_groups[0]["params"]]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def back_and_step(self) -> None:
        for p, before in zip(self.param_groups[0]["params"], self.before, strict=True):
            p.copy_(before)
        self.inner.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.climb()
        with torch.enable_grad():
            closure()
        self.back_and_step()


def by_calls(make: Callable[[Optimizer], Optimizer]) -> Callable[..., None]:
    def loop(trained: Any, model: Any, optimizer: Optimizer) -> None:
        outer = make(optimizer)
        for step in range(9):
            trained(*batch(step)).backward()
            outer.step()
            if not isinstance(outer, EveryFourth):
                outer.zero_grad()

    return loop


def sharpness_aware(trained: Any, model: Any, optimizer: Optimizer) -> None:
    outer = SAM(optimizer)
    for step in range(4):
        trained(*batch(step)).backward()
        outer.step(lambda step=step: trained(*batch(step)).backward())


def sharpness_aware_by_hand(trained: Any, model: Any, optimizer: Optimizer) -> None:
    outer = SAM(optimizer)
    for step in range(4):
        for half in (outer.climb, outer.back_and_step):
            trained(*batch(step)).backward()
            half()


def the_head_first(trained: Any, model: Any, optimizer: Optimizer) -> None:
    """Another optimizer has a part of the parameters, and the wrapped one waits."""
    head = SGD(model.head.parameters(), lr=0.1)
    for step in range(6):
        trained(*batch(step)).backward()
        head.step()
        trained.zero_grad()


def both_in_turn(trained: Any, model: Any, optimizer: Optimizer) -> None:
    """Two optimizers over everything, ours second."""
    other = SGD(trained.parameters(), lr=0.01)
    for step in range(6):
        for each in (other, optimizer):
            trained(*batch(step)).backward()
            each.step()
            trained.zero_grad()


def ours_is_called_and_skips(trained: Any, model: Any, optimizer: Optimizer) -> None:
    """A scaler that has seen infinities makes ours do nothing; the other goes on."""
    other = SGD(trained.parameters(), lr=0.0)
    for step in range(6):
        trained(*batch(step)).backward()
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        other.step()
        trained.zero_grad()


def another_model(trained: Any, model: Any, optimizer: Optimizer) -> None:
    """Ours accumulates over the whole loop; a plain model trains beside it."""
    plain = make_gpt(seed=1, layers=2)
    other = SGD(plain.parameters(), lr=0.01)
    for step in range(6):
        trained(*batch(step)).backward()
        plain_loop(plain, other, step)


def a_wrapper_that_is_dropped(trained: Any, model: Any, optimizer: Optimizer) -> None:
    del trained
    other = SGD(model.parameters(), lr=0.01)
    for step in range(6):
        plain_loop(model, other, step)


def unwrapped(trained: Any, model: Any, optimizer: Optimizer) -> None:
    for step in range(3):
        trained(*batch(step)).backward()
        trained.zero_grad()
    trained.unwrap()
    other = SGD(model.parameters(), lr=0.01)
    for step in range(6):
        plain_loop(model, other, step)


def after_ours(trained: Any, model: Any, optimizer: Optimizer) -> None:
    plain_loop(trained, optimizer, 0)
    other = SGD(trained.parameters(), lr=0.01)
    for step in range(6):
        plain_loop(trained, other, step)


def many_checkpoints(trained: Any, model: Any, optimizer: Optimizer) -> None:
    """Gradients at one set of weights after the other, and no step at all."""
    states = [make_gpt(seed=seed, layers=2).state_dict() for seed in range(6)]
    for step, state in enumerate(states):
        trained.load_state_dict(state)
        trained(*batch(step)).backward()
        trained.zero_grad()


NOTHING_WRONG: dict[str, Callable[..., None]] = {
    "Lookahead": by_calls(Lookahead),
    "an accumulating optimizer": by_calls(EveryFourth),
    "SAM": sharpness_aware,
    "SAM by hand": sharpness_aware_by_hand,
    "the head first": the_head_first,
    "both in turn": both_in_turn,
    "ours skips": ours_is_called_and_skips,
    "another model": another_model,
    "a dropped wrapper": a_wrapper_that_is_dropped,
    "unwrapped": unwrapped,
    "after ours": after_ours,
    "many checkpoints": many_checkpoints,
}


@pytest.mark.parametrize("loop", NOTHING_WRONG)
def test_nothing_is_told_of_a_loop_in_which_nothing_is_wrong(loop):
    trained, model, optimizer = wrapped()
    given = [trained]
    del trained
    with caught() as found:
        NOTHING_WRONG[loop](given.pop(), model, optimizer)
    assert told(found) == []


def test_an_optimizer_with_a_step_of_its_own_is_not_watched():
    """It runs whole anyway, and may be one around others that its user calls by hand."""
    model = make_gpt(layers=2)
    trained = AutoHeteWrapper(model, SGD(model.parameters(), lr=0.1), **KEYWORDS).to("cpu")
    other = AdamW(trained.parameters())
    with caught() as found:
        for step in range(6):
            plain_loop(trained, other, step)
    assert told(found) == []
    trained.unwrap()


def test_the_compiled_step_of_another_models_optimizer_runs_while_one_is_watched():
    trained, _, _ = wrapped()
    for step in range(3):  # gradients of three passes, and no step yet
        trained(*batch(step)).backward()
    plain, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    reference.load_state_dict(plain.state_dict())
    for model, is_compiled in ((plain, True), (reference, False)):
        optimizer = AdamW(model.parameters(), foreach=True)
        update: Any = optimizer.step
        if is_compiled:
            update = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            update()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    trained.unwrap()


def test_a_watched_run_is_let_go_of():
    trained, model, optimizer = wrapped()
    for step in range(3):
        trained(*batch(step)).backward()
    assert trained.run._others in _WATCHING
    del trained, model, optimizer
    gc.collect()
    assert not [w for w in _WATCHING if w._run() is None]
