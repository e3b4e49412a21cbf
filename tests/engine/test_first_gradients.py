"""The first half of a layer's gradients leaves, and is updated, while its backward goes on."""

from __future__ import annotations

from functools import partial

import pytest
from models import batch, make_gpt
from oracle import adamw, compare_with_plain, forced_plan, plain_loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from autohete import AutoHeteWrapper, early, first_gradients
from autohete.first_gradients import after_the_first
from autohete.run import Run
from autohete.units import find_units

STEPS = 10
SMALL = partial(make_gpt, layers=3)


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    """Every layer's gradients go in halves, however small and however little is waited for.

    Returns:
        The units whose first half was on its way when their backward went on, in that order.
    """
    sent = []

    def watched(run, index):
        send(run, index)
        if run.engine.unit_state(index) == ("computing", "leaving"):
            sent.append(index)

    send = Run.send_first_gradients
    monkeypatch.setattr(Run, "send_first_gradients", watched)
    monkeypatch.setattr(early, "_WORTHWHILE_WAIT", -1.0)
    monkeypatch.setattr(first_gradients, "_SMALLEST_BYTES", 1)
    monkeypatch.setattr(first_gradients, "_SHARE_OF_UNITS", 1)
    return sent


def compare(loop=plain_loop, kind="all", build=SMALL, prepare=None, steps=STEPS, **wrap):
    return compare_with_plain(loop, kind, prepare=prepare, wrap=wrap, steps=steps, build=build)


@pytest.mark.parametrize("kind", ["state", "all", "all+c"])
def test_halves_give_the_bits_of_plain_training(kind, halves):
    counted = compare(kind=kind)
    assert halves
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == counted["updates_redone"] == 0


def test_half_parameters_with_masters_too(halves):
    counted = compare(build=lambda: SMALL().bfloat16())
    assert halves
    assert counted["withdrawn"] == counted["updates_redone"] == 0


def test_the_first_half_is_updated_before_the_others_gradients_are_there(halves):
    """The middle of a layer's backward waits until the CPU lane has updated what there is."""
    waited = []

    def prepare(model):
        run = model.run
        run.engine.record_timeline(True)
        layer = next(i for i, unit in enumerate(run.units) if unit.is_layer)
        qkv = model.module.blocks[0].qkv if hasattr(model, "module") else model.blocks[0].qkv

        def hold(parameter):
            if not halves or halves[-1] != layer:
                return
            while (layer, "update ahead") not in [s[1:3] for s in run.engine.take_timeline()]:
                pass
            waited.append(layer)

        qkv.bias.register_post_accumulate_grad_hook(hold)

    compare(prepare=prepare)
    assert waited


def in_numpy(gradient):
    array = gradient.numpy()
    array *= 0.5


EDITS = {
    "in place": lambda p: p.grad.mul_(0.5),
    "by data": lambda p: p.grad.data.mul_(0.5),
    "in numpy": lambda p: in_numpy(p.grad),
    "replaced": lambda p: setattr(p, "grad", p.grad * 0.5),
    "removed": lambda p: setattr(p, "grad", None),
    "only read": lambda p: p.grad.norm(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_first_half_in_the_middle_of_backward_is_what_the_update_sees(edit, halves):
    steps = {}

    def loop(model, optimizer, step):
        blocks = dict(model.named_modules())
        block = next(m for name, m in blocks.items() if name.endswith("blocks.1"))
        if step == 0:
            steps[id(model)] = 0

            def edited(parameter):
                if steps[id(model)] % 2:
                    EDITS[edit](block.down.weight)

            block.qkv.bias.register_post_accumulate_grad_hook(edited)
        steps[id(model)] = step
        return plain_loop(model, optimizer, step)

    compare(loop)
    assert halves


def test_an_edit_after_backward_is_what_the_update_sees(halves):
    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        if step % 2:
            for parameter in model.parameters():
                parameter.grad.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    counted = compare(loop)
    assert halves
    assert counted["updates_redone"] > 0, "the hash of two halves is that of the whole"


@pytest.mark.parametrize("limit", [1e9, 0.05])
def test_clipping_gives_the_bits_of_plain_training(limit, halves):
    norms = []

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    counted = compare(loop)
    assert halves
    assert norms[:STEPS] == norms[STEPS:]
    assert counted["withdrawn"] == 0 or limit < 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients_are_final_before_they_are_updated(set_to_none):
    def loop(model, optimizer, step):
        total = 0.0
        for part in range(2):
            tokens, targets = batch(2 * step + part)
            loss = model(tokens, targets)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return total

    compare(loop)


def test_another_backward_before_step_takes_the_halves_back(halves):
    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward(retain_graph=step % 5 == 4)
        if step % 5 == 4:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    compare(loop, steps=18)
    assert halves


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_give_the_bits_of_plain_training(reentrant):
    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        inner = getattr(model, "module", model)
        x = inner.tokens(tokens) + inner.positions[: tokens.shape[1]]
        for block in inner.blocks:
            x = checkpoint(lambda y, b=block: b(b(y)), x, use_reentrant=reentrant)
        logits = inner.head(inner.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    compare(loop)


def test_a_backward_that_fails_in_the_middle_of_a_layer_leaves_a_model_that_trains(halves):
    fails = {}

    def loop(model, optimizer, step):
        block = next(m for name, m in model.named_modules() if name.endswith("blocks.1"))
        if step == 0:

            def fail(parameter):
                if fails.get("now"):
                    raise ArithmeticError("in the middle")

            block.qkv.bias.register_post_accumulate_grad_hook(fail)
        if step % 4 == 3:
            fails["now"] = True
            tokens, targets = batch(100 + step)
            with pytest.raises(ArithmeticError):
                model(tokens, targets).backward()
            fails["now"] = False
            optimizer.zero_grad()
        return plain_loop(model, optimizer, step)

    compare(loop, build=partial(SMALL, dropout=0.0), steps=16)
    assert halves


@pytest.mark.parametrize("seed", range(4))
def test_late_copies_do_not_change_a_bit(seed, halves):
    def prepare(model):
        model.run.side.machine.set_poison(True)
        model.run.side.machine.set_random_delays(seed, 0.002)

    compare(prepare=prepare)
    assert halves


def test_nothing_is_hooked_where_steps_do_not_wait(monkeypatch, halves):
    monkeypatch.setattr(early, "_WORTHWHILE_WAIT", 1e9)
    assert compare()["updates_ahead"] > 0
    assert not halves


def test_the_hooks_are_gone_after_unwrap():
    model = SMALL()
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="16MiB", cpu_mem="64MiB", profile_path=None,
        plan=forced_plan(model, "all"),
    ).to("cpu")  # fmt: skip
    for step in range(4):
        plain_loop(trained, optimizer, step)
    assert any(p._post_accumulate_grad_hooks for p in model.parameters())
    trained.unwrap()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_hook_is_behind_the_half_of_the_bytes_that_come_first():
    model = SMALL()
    unit = next(u for u in find_units(model) if u.is_layer)
    names = {id(p): name for name, p in model.blocks[0].named_parameters()}
    found = after_the_first(unit)
    assert found is not None
    assert names[id(found)] == "out.bias"  # `up` and `down` are two thirds


def test_a_layer_of_one_parameter_has_no_halves():
    unit = find_units(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))[0]
    assert after_the_first(unit) is None


@pytest.mark.parametrize("edited", [False, True])
def test_a_large_unit_at_the_turn_goes_in_parts_that_are_one_update(edited, monkeypatch):
    monkeypatch.setattr(early, "_WORTHWHILE_WAIT", 1e9)  # no halves
    downloads = {}

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        if isinstance(model, AutoHeteWrapper):
            tokens_unit, spans = 1, []  # 0 is the positions
            awaited = "update ahead" if step >= 2 else "download"  # two steps tell what to expect
            while (tokens_unit, awaited) not in [s[1:3] for s in spans]:
                spans += model.run.engine.take_timeline()
            model.run.engine.settle_gradients(tokens_unit)  # a part has begun: the others are, too
            spans += model.run.engine.take_timeline()
            downloads[step] = [s[5] for s in spans if s[1:3] == (tokens_unit, "download")]
        first = next(p for p in model.parameters() if p.shape[0] == 3000)
        first.grad.data.mul_(2 if edited and step % 2 else 1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    counted = compare(
        loop, build=lambda: make_gpt(layers=2, vocab=3000),
        prepare=lambda model: model.run.engine.record_timeline(True),
    )  # fmt: skip
    assert counted["updates_ahead"] > 0
    assert (counted["updates_redone"] > 0) == edited
    whole, parts = downloads[0], downloads[STEPS - 1]
    assert len(whole) == 1, "of a step whose update is not expected yet"
    assert len(parts) > 2
    assert sum(parts) == whole[0]
