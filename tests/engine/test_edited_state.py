"""optimizer.state edited between steps: the next step goes on from it, as in plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import assert_bit_equal, forced_plan, train
from torch import nn

SMALL = partial(make_gpt, layers=2)


class OwnTensor(torch.Tensor):
    pass


def part_of_a_larger(tensor):
    larger = torch.zeros(tensor.numel() + 7)
    part = larger[3 : 3 + tensor.numel()].view(tensor.shape)
    return part.copy_(tensor)


def swap(states):
    states[0]["exp_avg"].data, states[0]["exp_avg_sq"].data = (
        states[0]["exp_avg_sq"].abs(), states[0]["exp_avg"].abs(),
    )  # fmt: skip


def give_class(state, name, make):
    state[name] = make(state[name].clone() * 0.5)


EDITS: dict[str, Any] = {
    "other memory": lambda s: setattr(s["exp_avg"], "data", s["exp_avg"] * 0.5),
    "part of other memory": lambda s: setattr(
        s["exp_avg_sq"], "data", part_of_a_larger(s["exp_avg_sq"] * 2)
    ),
    "set_": lambda s: s["exp_avg"].set_(s["exp_avg"] * 0.5),
    "each other's memory": lambda s: swap([s]),
    "a parameter": lambda s: give_class(
        s, "exp_avg", lambda t: nn.Parameter(t, requires_grad=False)
    ),
    "a class of the user's": lambda s: give_class(
        s, "exp_avg_sq", lambda t: t.as_subclass(OwnTensor)
    ),
    "no first moment": lambda s: s.pop("exp_avg"),
    "no second moment": lambda s: s.pop("exp_avg_sq"),
    "no count": lambda s: s.pop("step"),
    "a count that is a number": lambda s: s.update(step=5),
}


@pytest.mark.parametrize("when", ["before forward", "before step", "after step"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_state_is_what_the_next_step_goes_on_from(edit, when):
    def loop(model, optimizer, step):
        def edited(at):
            if at == when and step in (2, 3, 5):
                for p in model.parameters():
                    EDITS[edit](optimizer.state[p])

        edited("before forward")
        loss = model(*batch(step))
        loss.backward()
        edited("before step")
        optimizer.step()
        edited("after step")
        optimizer.zero_grad()
        return loss.item()

    run = partial(train, steps=8, loop=loop, build=SMALL)
    expected = run(wrap=None)
    for kind in ("all+c", "state", "device"):
        assert_bit_equal(run(wrap={"plan": partial(forced_plan, kinds=kind)}), expected)


@pytest.mark.parametrize("kind", ["all", "state"])
def test_what_the_state_holds_is_what_the_user_holds(kind):
    """A tensor the user put there, or gave memory, shows what the updates make of it."""

    def loop(model, optimizer, step):
        p = next(model.parameters())
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        moment = optimizer.state[p]["exp_avg"]
        if step in (2, 3):
            moment.data = moment * 0.5
        optimizer.zero_grad()
        return moment.sum().item()

    run = partial(train, steps=6, loop=loop, build=SMALL)
    assert_bit_equal(run(wrap={"plan": partial(forced_plan, kinds=kind)}), run(wrap=None))
