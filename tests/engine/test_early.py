"""Updates ahead of step(): they happen, and nothing the loop does in between makes a difference."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, assert_bit_equal, compare_with_plain, forced_plan, plain_loop, train

from autohete import AutoHeteWrapper
from autohete.run import Run

STEPS = 12
KINDS = ("state", "all", "all+c")
SMALL = partial(make_gpt, layers=3)


def compare(loop, kind="all+c", steps=STEPS, optimizer=adamw, build=SMALL, prepare=None, **wrap):
    """Train under a forced plan and plainly; returns what the engine counted."""
    return compare_with_plain(
        loop, kind, prepare=prepare, wrap=wrap, steps=steps, optimizer=optimizer, build=build
    )


@pytest.mark.parametrize("kind", KINDS)
def test_units_are_updated_ahead_of_step_with_the_bits_of_plain_training(kind):
    counted = compare(plain_loop, kind)
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0


def await_update_ahead(run, parameter):
    """Until its unit is updated ahead of step(). Whoever reads a gradient stops what waits."""
    unit = next(i for i, u in enumerate(run.units) if any(p is parameter for p in u.parameters))
    ahead = (unit, "update ahead")
    while ahead not in [span[1:3] for span in run.engine.take_timeline()]:
        pass


@pytest.mark.parametrize("edited", [False, True])
def test_a_unit_that_is_updated_in_several_pieces_has_the_bits_of_plain_training(edited):
    """Of 4.5 million values: others may pass in between, and its gradient is one hash still."""
    wide = partial(make_gpt, layers=2, vocab=140_000)

    def edit(model, optimizer, step):
        if isinstance(model, AutoHeteWrapper) and step >= 2:  # two steps tell what to expect
            await_update_ahead(model.run, list(model.parameters())[-1])
        gradients(model)[-1].view(-1)[-3:].mul_(2 if edited else 1)

    counted = compare(
        between(edit), "all", steps=5, build=wide, gpu_mem="400MiB", cpu_mem="1GiB",
        prepare=lambda model: model.run.engine.record_timeline(True),
    )  # fmt: skip
    assert counted["updates_ahead"] > 0
    assert (counted["updates_redone"] > 0) == edited


def test_without_early_updates_every_update_waits_for_step():
    assert compare(plain_loop, early_updates=False)["updates_ahead"] == 0


def test_without_room_for_a_second_copy_updates_wait_for_step():
    model = SMALL()
    parameters = sum(p.nbytes for p in model.parameters())
    tight = int(parameters * 4.5)  # parameters, gradients, two moments, and whole pages
    in_room = compare(plain_loop)["updates_ahead"]
    assert compare(plain_loop, cpu_mem=tight)["updates_ahead"] < in_room


def test_half_parameters_with_masters_are_updated_ahead():
    counted = compare(plain_loop, build=lambda: SMALL().bfloat16())
    assert counted["updates_ahead"] > 0


def test_amsgrad_is_updated_ahead():
    assert compare(plain_loop, optimizer=partial(adamw, amsgrad=True))["updates_ahead"] > 0


def test_accumulated_gradients_are_updated_ahead_in_the_last_backward_only():
    def loop(model, optimizer, step):
        total = 0.0
        for part in range(3):
            tokens, targets = batch(3 * step + part)
            loss = model(tokens, targets) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    counted = compare(loop)
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0


def between(edit):
    """The plain loop with `edit(model, optimizer, step)` between backward() and step()."""

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        edit(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return loop


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def in_numpy(model):
    for gradient in gradients(model):
        array = gradient.numpy()
        array *= 0.5


def through_an_old_reference(model):
    held = gradients(model)
    held[0].norm()  # unguarded from here on
    held[0].data.mul_(3.0)


def rename(state):
    """The values stay where they are in the dict, under each other's keys."""
    first, second = state.pop("exp_avg"), state.pop("exp_avg_sq")
    state.update({"exp_avg_sq": first.abs_(), "exp_avg": second})


def swap_gradients(model):
    first, *_, last = (p for p in model.parameters() if p.shape == (32, 32))
    first.grad, last.grad = last.grad, first.grad


def share_a_gradient(model):
    first, second, *_ = (p for p in model.parameters() if p.shape == (32,))
    first.grad = second.grad


def clip(model, limit=0.05):
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


EDITS = {
    "clipped twice": lambda m, o, s: (clip(m), clip(m, 0.03)),
    "clipped, swapped, clipped": lambda m, o, s: (clip(m), swap_gradients(m), clip(m, 0.03)),
    "clipped, shared, clipped": lambda m, o, s: (clip(m), share_a_gradient(m), clip(m, 0.03)),
    "in place": lambda m, o, s: [g.mul_(0.5) for g in gradients(m)],
    "by data": lambda m, o, s: [g.data.mul_(0.5) for g in gradients(m)],
    "one element": lambda m, o, s: gradients(m)[-1].view(-1).__setitem__(3, 1.0),
    "in numpy": lambda m, o, s: in_numpy(m),
    "by foreach": lambda m, o, s: torch._foreach_mul_(gradients(m), 0.5),
    "negated": lambda m, o, s: [g.neg_() for g in gradients(m)],
    "old reference": lambda m, o, s: through_an_old_reference(m),
    "replaced": lambda m, o, s: [
        setattr(p, "grad", p.grad.clone() * 2) for p in m.parameters() if p.grad is not None
    ],
    "one removed": lambda m, o, s: setattr(next(m.parameters()), "grad", None),
    "value clipped": lambda m, o, s: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "weights": lambda m, o, s: [p.data.mul_(0.999) for p in m.parameters()],
    "weights in numpy": lambda m, o, s: [
        p.detach().numpy().__imul__(0.999) for p in m.parameters()
    ],
    "learning rate": lambda m, o, s: o.param_groups[0].update(lr=1e-3 * (1 + s % 3)),
    "decay": lambda m, o, s: o.param_groups[0].update(weight_decay=0.1 * (1 + s % 2)),
    "moments": lambda m, o, s: [v["exp_avg"].mul_(0.9) for v in o.state.values()],
    "moments under each other's names": lambda m, o, s: [rename(v) for v in o.state.values()],
    "moments loaded": lambda m, o, s: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "only read": lambda m, o, s: [g.abs().max() for g in gradients(m)],
}


@pytest.mark.parametrize("kind", ["state", "all"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_backward_and_step_is_what_the_update_sees(edit, kind):
    # Every other step only, so that the loop stays worth guessing at.
    loop = between(lambda m, o, s: EDITS[edit](m, o, s) if s % 2 else None)
    assert compare(loop, kind)["updates_ahead"] > 0


def test_what_nobody_touched_is_not_looked_at_again():
    """An update that ran ahead is over at step(): no other work of the CPU lane stands for it."""
    spans = []

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if isinstance(model, AutoHeteWrapper):
            model.synchronize()
            spans.extend(span[2] for span in model.run.engine.take_timeline())
        return loss

    counted = compare(loop, prepare=lambda model: model.run.engine.record_timeline(True))
    assert counted["updates_ahead"] > 0
    assert spans.count("update") == counted["updates"] - counted["updates_ahead"]


def test_gradients_that_are_only_read_cost_nothing_that_ran_ahead():
    counted = compare(between(lambda m, o, s: [g.abs().max() for g in gradients(m)]))
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == counted["updates_redone"] == 0


def test_a_view_taken_while_backward_ran_cannot_change_a_gradient_unseen():
    views = {}

    def prepare(model, key):
        parameter = list(model.parameters())[-1]
        parameter.register_post_accumulate_grad_hook(
            lambda p: views.__setitem__(key, p.grad.detach().view(-1))
        )

    def loop_for(key):
        def edit(model, optimizer, step):
            if step == 0:
                prepare(model, key)
            elif step % 2:
                views[key].mul_(0.25)

        return between(edit)

    ours = train(wrap={"plan": partial(forced_plan, kinds="all")}, steps=STEPS,
                 loop=loop_for("ours"), build=SMALL)  # fmt: skip
    assert_bit_equal(ours, train(wrap=None, steps=STEPS, loop=loop_for("plain"), build=SMALL))


def test_nothing_is_visible_before_step():
    model = SMALL()
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="16MiB", cpu_mem="64MiB", profile_path=None,
        plan=forced_plan(model, "all"),
    ).to("cpu")  # fmt: skip
    for step in range(4):
        plain_loop(trained, optimizer, step)
    weights = copy.deepcopy(trained.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])
    tokens, targets = batch(4)
    trained(tokens, targets).backward()
    assert all(torch.equal(weights[k], v) for k, v in trained.state_dict().items())
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], state[key][name]) for name in values)
    with torch.no_grad():
        again = trained(tokens, targets)
    reference = SMALL()
    reference.load_state_dict(weights)
    with torch.no_grad():
        torch.manual_seed(0)
        assert reference.eval()(tokens, targets) == trained.eval()(tokens, targets)
    assert torch.isfinite(again)
    trained.unwrap()


def test_another_backward_over_the_same_graph_sees_the_old_weights():
    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward(retain_graph=True)
        if step % 5 == 4:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert compare(loop, steps=18)["updates_ahead"] > 0


@pytest.mark.parametrize("taken_at", [0, 5])
@pytest.mark.parametrize("kind", ["all", "state"])
def test_numpy_arrays_of_parameters_and_moments_follow_the_updates(kind, taken_at):
    arrays = {}

    def loop(model, optimizer, step):
        if step == taken_at:
            first = list(model.parameters())[4]
            arrays[type(model)] = first, first.detach().numpy()
        loss = plain_loop(model, optimizer, step)
        if step > taken_at:
            parameter, array = arrays[type(model)]
            if isinstance(model, AutoHeteWrapper):
                model.synchronize()
            if kind == "all":  # what stays on the device is copied there after the update
                assert torch.equal(torch.from_numpy(array), parameter.detach())
            view = optimizer.state[parameter]["exp_avg"].view(-1)
            assert torch.equal(view, optimizer.state[parameter]["exp_avg"].flatten())
        return loss

    assert compare(loop, kind)["updates_ahead"] > 0, "of the other units"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_is_skipped_leaves_everything_as_it_was(set_to_none):
    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        if step % 4 != 3:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return loss.item()

    assert compare(loop, steps=18)["updates_ahead"] > 0


def clipping(max_norm, norms):
    def edit(model, optimizer, step):
        limit = max_norm(step) if callable(max_norm) else max_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())

    return between(edit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_that_does_not_clip_costs_nothing_that_ran_ahead(kind):
    norms = []
    counted = compare(clipping(1e9, norms), kind)
    assert norms[:STEPS] == norms[STEPS:], "the same norms, to the bit"
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0


@pytest.mark.parametrize("max_norm", [0.05, lambda step: 0.05 if step % 5 == 4 else 1e9])
def test_a_clip_that_clips_gives_the_bits_of_plain_training(max_norm):
    norms = []
    compare(clipping(max_norm, norms), steps=20)
    assert norms[:20] == norms[20:]


def test_a_clipped_gradient_reads_as_clipped_before_and_after_step():
    seen = []

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if step % 2:
            seen.append([g.clone() for g in gradients(model)])
        optimizer.step()
        seen.append([g.clone() for g in gradients(model)])
        if step % 3 == 0:  # else they are added to
            optimizer.zero_grad()
        return loss.item()

    compare(loop)
    half = len(seen) // 2
    for ours, plain in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_max_grad_norm_of_the_wrapper_clips_like_a_call_before_step():
    ours = train(
        wrap={"plan": partial(forced_plan, kinds="all"), "max_grad_norm": 0.05},
        steps=STEPS, build=SMALL,
    )  # fmt: skip
    assert_bit_equal(ours, train(wrap=None, steps=STEPS, loop=clipping(0.05, []), build=SMALL))


def test_a_loop_whose_guesses_fail_is_left_alone_and_told_once(caplog):
    caplog.set_level("INFO", logger="autohete")
    loop = between(lambda m, o, s: [g.mul_(0.5) for g in gradients(m)])
    compare(loop, steps=20)
    told = [m for m in caplog.messages if "updates wait for step()" in m]
    assert len(told) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_skips_steps_gives_the_bits_of_plain_training(fused):
    scalers = {}

    def loop(model, optimizer, step):
        if step == 0:
            scalers["now"] = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
        scaler = scalers["now"]
        tokens, targets = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, targets)
        scaler.scale(loss * (float("inf") if step == 7 else 1.0)).backward()
        if not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    compare(loop, steps=20)


def unscaling(init_scale, max_norm=None, look=None):
    """A loop whose scaler unscales before step(); `look(model, step)` sees the gradients then."""
    scalers = {}

    def loop(model, optimizer, step):
        if step == 0:
            scalers["now"] = torch.amp.GradScaler(
                "cpu", init_scale=init_scale, growth_factor=3.0, growth_interval=8
            )
        scaler = scalers["now"]
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if look:
            look(model, step)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    return loop


@pytest.mark.parametrize("init_scale", [1.0, 2.0**14, 1000.0])
@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_unscaling_costs_nothing_that_ran_ahead(init_scale, max_norm):
    counted = compare(unscaling(init_scale, max_norm), steps=7)  # the scale grows after 8
    assert counted["updates_ahead"] > 0
    assert counted["withdrawn"] == 0
    assert counted["updates_redone"] == 0


@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_grows_gives_the_bits_of_plain_training(kind, max_norm):
    counted = compare(unscaling(1000.0, max_norm), kind, steps=20)
    assert max_norm == 0.05 or counted["updates_ahead"] > 0


def test_an_unscaled_gradient_reads_as_unscaled():
    seen = []

    def look(model, step):
        if step > 4:
            seen.append([g.clone() for g in gradients(model)])

    compare(unscaling(1000.0, None, look), steps=10)
    half = len(seen) // 2
    for ours, plain in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_gradient_too_large_for_its_norm_is_unscaled_all_the_same():
    """Its squares overflow: finite values, an infinite norm."""
    loop = unscaling(2.0**100, None)
    compare(loop, steps=10)


def test_unscaling_twice_or_for_another_optimizer_scales_what_plain_pytorch_scales():
    def look(model, step):
        factor, found = torch.tensor(0.5), torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(gradients(model)[::2], found, factor)
        assert found == 0

    compare(unscaling(2.0**4, 0.5, look), steps=10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", [0, 7, -1])
def test_one_inf_in_any_unit_leaves_everything_as_if_the_batch_was_skipped(place, fused):
    scalers = {}

    def loop(model, optimizer, step):
        if step == 0:
            scalers["now"] = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            scalers["spoil"] = False
            list(model.parameters())[place].register_hook(
                lambda g: (
                    g.index_fill(0, torch.tensor([0]), float("inf")) if scalers["spoil"] else g
                )
            )
        scalers["spoil"] = step in (5, 9)
        scaler = scalers["now"]
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    compare(loop)
    assert scalers["now"].get_scale() == 2.0**8


@pytest.mark.parametrize("seed", range(4))
def test_late_copies_do_not_change_a_bit(seed):
    def prepare(model):
        model.run.side.machine.set_poison(True)
        model.run.side.machine.set_random_delays(seed, 0.002)

    norms = []
    loop = clipping(lambda step: 0.05 if step % 5 == 4 else 1e9, norms)
    compare(loop, steps=12, prepare=prepare)


def test_torchs_own_clipping_does_not_look_at_gradients_that_were_measured(monkeypatch):
    looked = []
    settle = Run.settle_gradients
    monkeypatch.setattr(
        Run, "settle_gradients", lambda run, index: (looked.append(index), settle(run, index))
    )
    at_step = []

    def clip(model, optimizer, step):
        looked.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        at_step.append(len(looked))

    compare(between(clip))
    assert at_step[STEPS - 1] == 0  # ours comes first
