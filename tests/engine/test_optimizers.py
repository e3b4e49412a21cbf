"""Optimizers, schedulers, scalers and resuming: as in plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import nn

from autohete import CPUSGD, AutoHeteWrapper, CPUAdam, CPUAdamW, CPULion

PLANS: dict[str, dict[str, Any]] = {
    "all+c": {"plan": partial(forced_plan, kinds="all+c")},
    "state": {"plan": partial(forced_plan, kinds="state")},
    "device": {"plan": partial(forced_plan, kinds="device")},
    "planned": {},
}


def wrap(model, optimizer, kind="all+c", **keywords):
    plan = forced_plan(model, kind) if kind else None
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **keywords}
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")


# ------------------------------------------------------------------- schedulers

SCHEDULERS = {
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=20),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_made_before_and_after_wrapping_change_the_rate_alike(name, before):
    def run(wrapped):
        model = make_gpt(layers=2)
        optimizer = adamw(model)
        scheduler = SCHEDULERS[name](optimizer) if before or not wrapped else None
        trained = wrap(model, optimizer) if wrapped else model
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        torch.manual_seed(7)
        losses = []
        for step in range(5):
            losses.append(plain_loop(trained, optimizer, step))
            scheduler.step(*[losses[-1]] * (name == "Plateau"))
        if wrapped:
            trained.unwrap()
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        return Result(losses, model, optimizer)

    assert_bit_equal(run(True), run(False))


# ------------------------------------------------------------------- groups


def test_a_group_added_while_wrapped_is_refused_in_words():
    model = make_gpt(layers=2).requires_grad_(True)
    optimizer = CPUAdamW(model.blocks.parameters(), lr=1e-3)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, 0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="unwrap\\(\\) before add_param_group"):
        plain_loop(trained, optimizer, 1)
    trained.unwrap()
    assert "step" not in vars(optimizer)


def test_a_parameter_of_the_model_added_while_wrapped_is_refused_in_words():
    model = make_gpt(layers=2)
    optimizer = CPUAdamW(model.blocks.parameters(), lr=1e-3)
    trained = wrap(model, optimizer)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    with pytest.raises(ValueError, match="unwrap\\(\\)"):
        plain_loop(trained, optimizer, 0)
    trained.unwrap()
    plain_loop(model, optimizer, 1)


# ------------------------------------------------------------------- resuming


def torch_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [adamw, torch_adamw], ids=["CPUAdamW", "torch.optim.AdamW"])
def test_training_resumed_under_autohete_goes_on_as_if_it_had_not_stopped(make, half):
    """Three legs, each from the files of the one before, in new objects."""

    def build():
        model = make_gpt(layers=2, dropout=0.0)
        return model.bfloat16() if half else model

    model = build()
    optimizer = make(model)
    trained = wrap(model, optimizer)
    losses = [plain_loop(trained, optimizer, step) for step in range(6)]
    trained.unwrap()
    expected = Result(losses, model, optimizer)

    losses, saved = [], None
    for leg, kind in enumerate(["all+c", "state", None]):
        model = build()
        optimizer = make(model)
        # After wrapping, or before; torch's own load_state_dict loses bits of half state.
        load_late = leg == 1 or (half and make is torch_adamw)
        if saved and not load_late:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        trained = wrap(model, optimizer, kind)
        if saved and load_late:
            trained.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        losses += [plain_loop(trained, optimizer, step) for step in (2 * leg, 2 * leg + 1)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_state_goes_from_plain_to_autohete_and_back_to_the_bit(half):
    def build():
        model = make_gpt(layers=2, dropout=0.0)
        return model.bfloat16() if half else model

    model = build()
    optimizer = adamw(model)
    expected = Result([plain_loop(model, optimizer, step) for step in range(6)], model, optimizer)
    losses, saved = [], None
    for leg, wrapped in enumerate([False, True, False]):
        model = build()
        optimizer = adamw(model)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        trained = wrap(model, optimizer) if wrapped else model
        losses += [plain_loop(trained, optimizer, step) for step in (2 * leg, 2 * leg + 1)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if wrapped:
            trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)


def test_cleared_state_starts_anew():
    def loop(model, optimizer, step):
        if step == 2:
            optimizer.state.clear()
        return plain_loop(model, optimizer, step)

    expected = train(wrap=None, steps=4, loop=loop)
    for keywords in PLANS.values():
        assert_bit_equal(train(wrap=keywords, steps=4, loop=loop), expected)


# ------------------------------------------------------------------- options of AdamW


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"eps": 1e-4}])
def test_options_of_the_optimizer_give_the_bits_of_plain_training(options):
    make = partial(adamw, **options)
    expected = train(wrap=None, steps=4, optimizer=make)
    for keywords in PLANS.values():
        assert_bit_equal(train(wrap=keywords, steps=4, optimizer=make), expected)


def test_hyper_parameters_edited_between_steps_are_used():
    def loop(model, optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["betas"] = (0.8, 0.9 + step / 100)
            group["weight_decay"] += 0.1
        return plain_loop(model, optimizer, step)

    expected = train(wrap=None, steps=4, loop=loop)
    for keywords in PLANS.values():
        assert_bit_equal(train(wrap=keywords, steps=4, loop=loop), expected)


def test_step_hooks_of_the_optimizer_run_once_a_step():
    def run(wrapped):
        calls = []
        model = make_gpt(layers=2)
        optimizer = adamw(model)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        trained = wrap(model, optimizer) if wrapped else model
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        plain_loop(trained, optimizer, 0)
        if wrapped:
            trained.unwrap()
            plain_loop(model, optimizer, 1)
        return calls

    assert run(False) == ["before", "after"]
    assert run(True) == ["before", "after"] * 2


def test_max_grad_norm_clips_as_clip_grad_norm_does():
    def clipped(model, optimizer, step):
        loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    expected = train(wrap=None, steps=4, loop=clipped)
    for keywords in PLANS.values():
        assert_bit_equal(train(wrap={**keywords, "max_grad_norm": 0.5}, steps=4), expected)


# ------------------------------------------------------------------- GradScaler


def scaled(make_optimizer, wrapped, kind):
    model = make_gpt(layers=2)
    optimizer = make_optimizer(model)
    trained = wrap(model, optimizer, kind) if wrapped else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    torch.manual_seed(7)
    losses, scales = [], []
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = trained(*batch(step))
        scaler.scale(loss * (float("inf") if step in (1, 4) else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    if wrapped:
        trained.unwrap()
    assert scales[0] != scales[-1]
    return Result([*losses, *scales], model, optimizer)


@pytest.mark.parametrize("kind", ["all+c", "state", "device", None])
def test_grad_scaler_with_infinite_steps_gives_the_bits_of_plain_training(kind):
    assert_bit_equal(scaled(adamw, True, kind), scaled(adamw, False, kind))


# ------------------------------------------------------------------- other optimizers

OTHERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01),
    "CPUAdam": lambda m: CPUAdam(m.parameters(), lr=1e-3, weight_decay=0.1),
    "CPUSGD": lambda m: CPUSGD(m.parameters(), lr=0.05, momentum=0.9),
    "CPULion": lambda m: CPULion(m.parameters(), lr=1e-3),
    "CPUAdamW, bf16": lambda m: CPUAdamW(m.parameters(), moment_dtype=torch.bfloat16, seed=1),
    "AdamW, a subclass": lambda m: OwnAdamW(m.parameters(), lr=1e-3),
    "Prodigy": lambda m: third_party("prodigyopt", "Prodigy")(m.parameters(), lr=1.0),
    "Lion": lambda m: third_party("lion_pytorch", "Lion")(m.parameters(), lr=1e-3),
}
NATIVE = {"Adam", "AdamW"}  # compared with CPUAdamW everywhere else
NO_DENSE = {"SparseAdam"}


class OwnAdamW(torch.optim.AdamW):
    """Not torch's own: what it adds is kept."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sign_()
        return super().step(closure)


def third_party(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(module), name)


def test_every_optimizer_of_torch_is_tried_here():
    known = {n for n, o in vars(torch.optim).items() if isinstance(o, type)} - {"Optimizer"}
    assert known == known & (OTHERS.keys() | NATIVE | NO_DENSE)


def closing_loop(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        return loss

    return optimizer.step(closure).item()


@pytest.mark.parametrize("plan", ["planned", pytest.param("all+c", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_run_their_own_step_to_the_same_bits(name, plan):
    loop = closing_loop if name == "LBFGS" else plain_loop
    build = partial(make_gpt, layers=2, dropout=0.0)
    expected = train(wrap=None, steps=4, optimizer=OTHERS[name], loop=loop, build=build)
    ours = train(wrap=PLANS[plan], steps=4, optimizer=OTHERS[name], loop=loop, build=build)
    assert ours.losses == expected.losses
    for p, q in zip(ours.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(p, q)
        state, reference = ours.optimizer.state.get(p, {}), expected.optimizer.state.get(q, {})
        assert state.keys() == reference.keys()
        for key, value in reference.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[key], value), key
            elif isinstance(value, (int, float)):
                assert state[key] == value, key
    for ours_group, group in zip(
        ours.optimizer.param_groups, expected.optimizer.param_groups, strict=True
    ):
        for key in group.keys() - {"params"}:  # Prodigy keeps its estimate here
            assert str(ours_group[key]) == str(group[key]), key
