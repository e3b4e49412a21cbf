"""Failures that users of other offload libraries met, as small cases with the right behaviour.

Those that other tests show already are not repeated here; docs/compatibility.md lists them all.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import Tensor, nn
from torch.optim import Optimizer

from autohete import AutoHeteWrapper, CPUAdamW
from autohete._C import CopyDirection

KINDS = ("all+c", "state", "device")


def wrap(model: nn.Module, optimizer: Any, kind: str | None = "all+c", **keywords: Any) -> Any:
    plan = forced_plan(model, kind) if kind else None
    known = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, "plan": plan}
    return AutoHeteWrapper(model, optimizer, **{**known, **keywords}).to("cpu")


class Times(nn.Module):
    """Its gradient is its input, summed."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def times(count: int = 3) -> nn.Module:
    return nn.ModuleList([Times() for _ in range(count)])


def backward_of(model: nn.Module, value: float) -> None:
    """Every weight gets the gradient `value`."""
    sum(layer(torch.full((4,), value)).sum() for layer in model).backward()


# ------------------------------------------------------------------- gradients


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_every_micro_batch_arrives_in_the_moments(micro_batches, kind):
    """Gradients of 1, 10, 100, ...: the sum shows which arrived. Three steps, the last shorter."""
    model = times()
    optimizer = CPUAdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    trained = wrap(model, optimizer, kind)
    expected = 0.0
    for step in range(3):
        count = micro_batches if step < 2 else max(micro_batches - 1, 1)
        for k in range(count):
            backward_of(trained, 10.0**k)
        total = sum(10.0**k for k in range(count))
        assert nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() == (
            pytest.approx(total * 12**0.5)
        )
        optimizer.step()
        optimizer.zero_grad()
        expected = 0.9 * expected + 0.1 * total
        for p in model.parameters():
            assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([expected] * 4)
    trained.unwrap()


CLIPPED: dict[str, Any] = {
    "norm": (lambda ps: nn.utils.clip_grad_norm_(ps, 1.0).item(), 10.0, 0.1),
    "value": (lambda ps: nn.utils.clip_grad_value_(ps, 0.25), None, 0.25 / (10 / 12**0.5)),
    "by hand": (lambda ps: [p.grad.mul_(0.5) for p in ps] and None, None, 0.5),
}


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("how", CLIPPED)
def test_clipping_after_backward_reaches_the_update_and_returns_the_norm(how, kind):
    clip, norm, factor = CLIPPED[how]
    model = times()
    optimizer = CPUAdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    trained = wrap(model, optimizer, kind)
    raw = 10 / 12**0.5  # 12 elements: the norm is 10
    backward_of(trained, raw)
    returned = clip(list(model.parameters()))
    optimizer.step()
    assert returned == (None if norm is None else pytest.approx(norm))
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([0.1 * factor * raw] * 4)
        expected = -factor * raw / (factor * raw + 1)  # eps of 1: the weight shows the size too
        assert p.tolist() == pytest.approx([expected] * 4)
    trained.unwrap()


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_over_gradients_in_both_places_counts_a_tied_weight_once(kind):
    def norms(wrapped: bool) -> list[float]:
        model = make_gpt(tied=True)
        optimizer = adamw(model)
        half = dict.fromkeys(range(0, 8, 2), kind)  # the others are on the device
        plan = forced_plan(model, half)
        trained = (
            AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", plan=plan).to("cpu")
            if wrapped
            else model
        )
        torch.manual_seed(7)
        trained(*batch(0)).backward()
        return [nn.utils.clip_grad_norm_(trained.parameters(), 1e-3).item() for _ in range(2)]

    assert norms(True) == norms(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_value_in_one_layer_changes_nothing_when_a_scaler_checks(value, where, kind):
    """bf16 parameters: the third batch is bad, and the run is that of skipping it."""

    def build() -> nn.Module:
        return make_gpt(dropout=0.0).bfloat16()

    def loop(model: Any, optimizer: Optimizer, step: int, bad: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
        loss = model(*batch(step))
        handle = None
        if bad:
            weight = model.blocks[where].up.weight
            handle = weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), value))
        scaler.scale(loss).backward()
        if handle is not None:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    def run(wrapped: bool, skips: bool) -> Result:
        model = build()
        optimizer = adamw(model)
        trained = wrap(model, optimizer, kind) if wrapped else model
        losses = []
        for step in range(5):
            if step == 2 and skips:
                continue
            loss = loop(trained, optimizer, step, bad=step == 2)
            losses += [loss] if step != 2 else []
        if wrapped:
            trained.unwrap()
        return Result(losses, model, optimizer)

    assert_bit_equal(run(True, False), run(False, True))


@pytest.mark.parametrize("kind", KINDS)
def test_unscaling_without_a_step_leaves_weights_and_counters(kind):
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    plain_loop(trained, optimizer, 0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(trained(*batch(1))).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
    optimizer.zero_grad()
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), before[0].values(), strict=True)
    )
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][index][key]) for key, value in state.items())
    trained.unwrap()


# ------------------------------------------------------------------- groups, odd sizes, ties


def three_groups(model: nn.Module) -> CPUAdamW:
    """Interleaved, in another order than the modules, one of them empty."""
    parameters = dict(model.named_parameters())
    tokens = parameters.pop("tokens.weight")
    vectors = [p for p in parameters.values() if p.dim() == 1]
    matrices = [p for p in parameters.values() if p.dim() > 1]
    groups = [
        {"params": vectors[::-1], "weight_decay": 0.0},
        {"params": []},
        {"params": [tokens], "lr": 1e-2, "betas": (0.8, 0.95)},
        {"params": matrices, "weight_decay": 0.1},
    ]
    return CPUAdamW(groups, lr=3e-3)


LAST_BLOCK = 5  # unit index


@pytest.mark.parametrize("kind", ["all", "state"])
def test_an_update_that_is_still_queued_uses_the_rate_of_its_own_step(kind):
    def run(wrapped: bool) -> Result:
        model = make_gpt()
        optimizer = three_groups(model)
        plan = forced_plan(model, {LAST_BLOCK: kind})
        # Updates ahead of step() would wait for the copies that are held.
        options = {"plan": plan, "early_updates": False}
        trained = wrap(model, optimizer, None, **options) if wrapped else model
        torch.manual_seed(7)
        losses = []
        for step in range(4):
            if wrapped:
                while trained.run.engine.unit_state(LAST_BLOCK)[1] != "idle":
                    os.sched_yield()  # the last step's copy is not to be held
                trained.run.side.machine.hold(CopyDirection.DEVICE_TO_HOST)
            loss = trained(*batch(step))
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # gradients have not even left yet
            if wrapped:
                trained.run.side.machine.release_all(CopyDirection.DEVICE_TO_HOST)
            optimizer.zero_grad()
            losses.append(loss.item())
        assert [len(g["params"]) for g in optimizer.param_groups][1:3] == [0, 1]
        if wrapped:
            trained.unwrap()
        return Result(losses, model, optimizer)

    assert_bit_equal(run(True), run(False))


class OddSizes(nn.Module):
    """An empty layer that is used, a number, a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.second = nn.Linear(1, 8)
        self.empty = nn.Linear(8, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) * self.scale
        assert self.empty.weight.shape == (0, 8)
        return torch.cat([x, self.empty(x)], -1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", [*KINDS, None])
def test_empty_single_and_0_dim_parameters_train_and_are_saved(kind, tmp_path):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(OddSizes(), OddSizes())

    def groups(model: nn.Module) -> CPUAdamW:
        empty = [p for p in model.parameters() if p.numel() == 0]
        rest = [p for p in model.parameters() if p.numel()]
        return CPUAdamW([{"params": rest}, {"params": empty}], lr=1e-2)

    def loop(model: Any, optimizer: Optimizer, step: int) -> float:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, AutoHeteWrapper) and step == 3:
            model.save_checkpoint(tmp_path / "odd.pt")
            assert model.load_checkpoint(tmp_path / "odd.pt") == {}
        return loss.item()

    wrapped: dict[str, Any] = {"plan": partial(forced_plan, kinds=kind)} if kind else {}
    run = partial(train, build=build, optimizer=groups, loop=loop, steps=5)
    assert_bit_equal(run(wrap=wrapped), run(wrap=None))
    if kind:
        saved = torch.load(tmp_path / "odd.pt")["model"]
        assert saved["0.empty.weight"].shape == (0, 8) and saved["0.scale"].shape == ()


@pytest.mark.parametrize("kind", ["all+c", "state"])
def test_tied_weights_hold_under_delayed_copies_and_through_load_copy_and_unwrap(kind, tmp_path):
    def delays(trained: Any) -> None:
        trained.run.side.machine.set_random_delays(3, 2e-3)
        trained.run.side.machine.set_poison(True)

    build = partial(make_gpt, tied=True)
    run = partial(train, steps=4, build=build)
    ours = run(wrap={"plan": partial(forced_plan, kinds=kind)}, prepare=delays)
    assert_bit_equal(ours, run(wrap=None))
    model = build()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    plain_loop(trained, optimizer, 0)
    trained.save_checkpoint(tmp_path / "tied.pt")
    trained.load_checkpoint(tmp_path / "tied.pt")
    trained.load_state_dict(copy.deepcopy(trained.state_dict()))
    for twin in (copy.deepcopy(trained), model, trained.unwrap()):
        assert twin.head.weight is twin.tokens.weight
    assert len([p for p in optimizer.state if p is model.head.weight]) == 1


# ------------------------------------------------------------------- state, contracts


@pytest.mark.parametrize("kind", ["all+c", "state"])
def test_state_stays_on_the_host_when_accelerate_prepares_and_loads_it(kind):
    """Accelerate moves and reloads the whole state dict; moments end where updates find them."""
    accelerate = pytest.importorskip("accelerate")
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    plain_loop(trained, optimizer, 0)
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    prepared.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = trained.run.side.used()
    plain_loop(trained, optimizer, 1)
    assert trained.run.side.used() == before
    for u, unit in enumerate(trained.run.units):
        for i, p in enumerate(unit.parameters):
            homes = trained.run.engine.state(u, i)
            for key in ("exp_avg", "exp_avg_sq"):
                assert optimizer.state[p][key].data_ptr() == homes[key].data_ptr()
                assert optimizer.state[p][key].device.type == "cpu"
    trained.unwrap()


def test_the_wrapped_optimizer_is_an_optimizer_in_every_way_loops_ask():
    model = make_gpt(layers=2)
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    assert isinstance(optimizer, Optimizer) and optimizer.defaults["lr"] == 3e-3
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.5**s, lambda s: 0.1**s])
    loss = optimizer.step(lambda: trained(*batch(0)).mean())
    assert isinstance(loss, Tensor)
    rates.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1.5e-3, 3e-4])
    trained(*batch(0)).backward()
    optimizer.step()
    assert set(optimizer.state[model.head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="unwrap"):
        optimizer.step()
    trained.unwrap()


def test_models_of_variable_lengths_and_two_wrapped_models_in_one_process():
    """Actor and critic, each with its own optimizer, fed sequences of another length each step."""

    def run(wrapped: bool) -> list[Result]:
        pairs = []
        for seed, kind in ((0, "all+c"), (1, None)):
            model = make_gpt(seed=seed, layers=2)
            optimizer = adamw(model)
            pairs.append((model, optimizer, wrap(model, optimizer, kind) if wrapped else model))
        torch.manual_seed(7)
        losses: list[list[float]] = [[], []]
        for step in range(6):
            tokens, targets = batch(step, length=(16, 5, 9, 13, 2, 16)[step])
            actor, critic = (trained for _, _, trained in pairs)
            advantage = critic(tokens).mean()
            loss = actor(tokens, targets) * (1 + advantage.detach()) + advantage.square()
            loss.backward()
            for index, (_, optimizer, _) in enumerate(pairs):
                optimizer.step()
                optimizer.zero_grad()
                losses[index].append(loss.item())
        if wrapped:
            for _, _, trained in pairs:
                trained.unwrap()
        return [
            Result(given, model, optimizer)
            for given, (model, optimizer, _) in zip(losses, pairs, strict=True)
        ]

    for ours, expected in zip(run(True), run(False), strict=True):
        assert_bit_equal(ours, expected)
