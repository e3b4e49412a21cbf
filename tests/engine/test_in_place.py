"""early_updates="in_place": no second copy, the bits of plain training, and an error if broken."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, forced_plan, plain_loop
from test_early import EDITS, SMALL, between, compare

from autohete import AutoHeteWrapper

in_place = partial(compare, early_updates="in_place")
BROKEN = 'early_updates: it is "in_place"'


def wrapped(kind="all+c", build=SMALL, **config):
    model = build()
    optimizer = adamw(model)
    config = {"gpu_mem": "1GiB", "profile_path": None, "early_updates": "in_place", **config}
    return AutoHeteWrapper(model, optimizer, plan=forced_plan(model, kind), **config), optimizer


def backward(model, step):
    tokens, targets = batch(step)
    loss = model(tokens, targets)
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", ["state", "all", "all+c"])
def test_a_promised_loop_has_the_bits_of_plain_training_without_a_second_copy(kind):
    seen = {}

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if isinstance(model, AutoHeteWrapper):
            seen["reserved"] = model.run.engine.bytes_reserved_ahead()
        return loss

    counted = in_place(loop, kind)
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0
    assert seen["reserved"] == 0


@pytest.mark.parametrize("build", [lambda: SMALL().bfloat16(), partial(make_gpt, layers=1)])
def test_half_parameters_and_single_layers_too(build):
    assert in_place(plain_loop, build=build)["updates_ahead"] > 0


def accumulated(parts):
    def loop(model, optimizer, step):
        total = 0.0
        for part in range(parts(step)):
            tokens, targets = batch(3 * step + part)
            loss = model(tokens, targets) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return loop


def test_the_last_of_the_announced_backward_passes_updates():
    counted = in_place(accumulated(lambda step: 3), gradient_accumulation_steps=3)
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0


def test_a_shorter_window_at_the_end_of_an_epoch_keeps_the_promise():
    in_place(accumulated(lambda step: 3 if step % 4 else 2), gradient_accumulation_steps=3)


class Twice(torch.nn.Module):
    """A layer that is called twice, and weights that another module uses too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(256, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.head = torch.nn.Linear(32, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[1]]:
            x = x + torch.tanh(layer(x))
        logits = self.head(x) + torch.nn.functional.linear(x, self.embed.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def test_units_called_twice_and_tied_weights_are_updated_after_their_last_gradient():
    assert in_place(plain_loop, build=Twice)["updates_ahead"] > 0


def test_looking_at_gradients_and_losses_keeps_the_promise():
    norms = {}

    def look(model, optimizer, step):
        norms[step] = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]

    assert in_place(between(look))["updates_ahead"] > 0
    assert len(norms) > 3


# A gradient may be taken away before its update has started: see the test after the next.
EDITED = {n: edit for n, edit in EDITS.items() if n not in ("only read", "one removed")}


@pytest.mark.parametrize("edit", EDITED)
def test_whatever_changes_between_backward_and_step_is_an_error(edit):
    model, optimizer = wrapped()
    loop = between(EDITED[edit])

    def go_on():
        for step in range(6):
            loop(model, optimizer, step)
        model.synchronize()
        loop(model, optimizer, 6)

    with pytest.raises(RuntimeError, match=BROKEN):
        go_on()


def test_a_gradient_taken_away_makes_no_difference_or_is_an_error():
    try:
        in_place(between(EDITS["one removed"]))
    except RuntimeError as error:
        if BROKEN not in str(error):
            raise


def train(model, optimizer, steps=4):
    for step in range(steps):
        plain_loop(model, optimizer, step)


def test_a_step_that_is_left_out_is_an_error_at_the_next_forward():
    model, optimizer = wrapped()
    train(model, optimizer)
    backward(model, 4)
    with pytest.raises(RuntimeError, match=BROKEN):
        backward(model, 5)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.state_dict(),
        lambda m: str(list(m.parameters())),
        lambda m: [p.sum().item() for p in m.parameters()],
        lambda m: torch.no_grad()(m)(*batch(9)),
    ],
)
def test_values_of_half_a_step_are_never_shown(use):
    model, optimizer = wrapped()
    train(model, optimizer)
    backward(model, 4)
    with pytest.raises(RuntimeError, match=BROKEN):
        use(model)
    with pytest.raises(RuntimeError, match=BROKEN):  # nor later
        optimizer.step()


def test_what_is_promised_once_broken_can_be_unwrapped():
    model, optimizer = wrapped()
    train(model, optimizer)
    backward(model, 4)
    with pytest.raises(RuntimeError, match=BROKEN):
        backward(model, 5)
    plain = model.unwrap()
    optimizer.zero_grad()
    plain_loop(plain, optimizer, 5)


def test_an_exception_in_backward_is_the_one_that_is_seen():
    model, optimizer = wrapped()
    train(model, optimizer)

    def fail(gradient):
        raise KeyboardInterrupt

    tokens, targets = batch(4)
    handle = next(iter(model.parameters())).register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(tokens, targets).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=BROKEN):
        plain_loop(model, optimizer, 5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"early_updates": "inplace"}, "early_updates is 'inplace', expected True, False or"),
        ({"max_grad_norm": 1.0}, "expected no clipping"),
    ],
)
def test_what_cannot_be_promised_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        wrapped(**config)


@pytest.mark.parametrize("seed", range(12))
def test_copies_that_land_while_step_runs_keep_the_promise(seed):
    def prepare(model):
        model.run.side.machine.set_poison(True)
        model.run.side.machine.set_random_delays(seed, 0.003)

    assert in_place(plain_loop, "all", steps=20, prepare=prepare)["withdrawn"] == 0
