"""What a user who tried to break it found; each kept as the right behaviour."""

from __future__ import annotations

import json
import os
import random
import threading
from functools import partial

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW


def linears(count: int = 4, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def optimizer_of(model: nn.Module) -> CPUAdamW:
    return CPUAdamW(model.parameters(), lr=1e-2)


def square_loop(model, optimizer, step, after=lambda model: None):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    after(model)
    return loss.item()


def replace_data(model):
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("keywords", [{}, *({"plan": k} for k in ("all+c", "state", "device"))])
def test_storages_replaced_after_every_step_are_taken_up(keywords):
    if keywords:
        keywords = {"plan": partial(forced_plan, kinds=keywords["plan"])}
    run = partial(
        train, steps=5, build=linears, optimizer=optimizer_of,
        loop=partial(square_loop, after=replace_data),
    )  # fmt: skip
    assert_bit_equal(run(wrap=keywords), run(wrap=None))


def test_a_storage_replaced_before_unwrap_is_kept():
    model = linears()
    optimizer = optimizer_of(model)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="1MiB", profile_path=None).to("cpu")
    square_loop(trained, optimizer, 0)
    model[0].weight.data = torch.full((16, 16), 0.25)
    trained.unwrap()
    assert torch.equal(model[0].weight, torch.full((16, 16), 0.25))


class Clamping(nn.Module):
    """Writes to its own parameters in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.05, 0.05)
        return self.linear(x)


def clamping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Clamping() for _ in range(5)])


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_parameters_written_in_forward_come_home_before_their_slot_is_given_away(window, seed):
    def delays(model):
        model.run.side.machine.set_random_delays(seed, 1e-3)

    run = partial(train, steps=5, build=clamping, optimizer=optimizer_of, loop=square_loop)
    plan = partial(forced_plan, kinds="all", window=window)
    assert_bit_equal(run(wrap={"plan": plan}, prepare=delays), run(wrap=None))


def test_a_model_whose_last_unit_is_a_repeated_layer_gets_a_plan():
    run = partial(
        train, steps=3, build=partial(linears, width=16), optimizer=optimizer_of, loop=square_loop
    )
    ours = run(wrap={"gpu_mem": "1MiB"})
    assert ours.extra["plan"].strategy == "autohete"
    assert_bit_equal(ours, run(wrap=None))


class Jitter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x * random.random()).tanh()


def jitter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Jitter() for _ in range(3)])


def test_a_recomputed_unit_draws_the_same_from_pythons_generator():
    def run(wrap):
        random.seed(3)
        return train(wrap=wrap, steps=4, build=jitter, optimizer=optimizer_of, loop=square_loop)

    assert_bit_equal(run({"plan": partial(forced_plan, kinds="all+c")}), run(None))


class OwnParameter(nn.Parameter):
    pass


def with_own_class() -> nn.Module:
    model = linears(width=16)
    for layer in model:
        layer.weight = OwnParameter(layer.weight.data)
    return model


def test_parameters_of_a_class_of_their_own_are_final_after_step():
    def halve(model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)

    run = partial(
        train, steps=4, build=with_own_class, optimizer=optimizer_of,
        loop=partial(square_loop, after=halve),
    )  # fmt: skip
    for kind in ("all+c", "state"):
        assert_bit_equal(run(wrap={"plan": partial(forced_plan, kinds=kind)}), run(wrap=None))


def test_a_parameter_of_another_wrapped_model_is_refused():
    first, second = linears(), linears()
    second[0].weight = first[0].weight
    one = AutoHeteWrapper(first, optimizer_of(first), gpu_mem="1MiB", profile_path=None).to("cpu")
    two = AutoHeteWrapper(second, optimizer_of(second), gpu_mem="1MiB", profile_path=None)
    with pytest.raises(ValueError, match=r"0\.weight belongs to another wrapped model"):
        two.to("cpu")
    one.unwrap()


def test_parameters_that_share_memory_are_refused():
    model = linears()
    model[1].weight.data = model[0].weight.data
    wrapper = AutoHeteWrapper(model, optimizer_of(model), gpu_mem="1MiB", profile_path=None)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share memory"):
        wrapper.to("cpu")


@pytest.mark.parametrize("kind", ["all+c", "state"])
def test_a_forked_child_evaluates_with_the_newest_weights_and_ends(kind):
    model = make_gpt()
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="16MiB", plan=forced_plan(model, kind), profile_path=None
    ).to("cpu")
    torch.manual_seed(7)
    plain_loop(trained, optimizer, 0)  # updates are in flight at the fork
    reference = train(wrap=None, steps=1).model.eval()
    child = os.fork()
    if child == 0:
        try:
            trained.eval()
            with torch.no_grad():
                equal = torch.equal(trained(batch(1)[0]), reference(batch(1)[0]))
            os._exit(0 if equal else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.isfinite(torch.tensor(plain_loop(trained, optimizer, 1)))
    trained.unwrap()


def test_threads_that_evaluate_together_take_turns():
    model = make_gpt()
    trained = AutoHeteWrapper(
        model, adamw(model), gpu_mem="16MiB", plan=forced_plan(model, "all"), profile_path=None
    ).to("cpu")
    trained.eval()
    results: list[torch.Tensor] = []

    def evaluate():
        with torch.no_grad():
            for _ in range(5):
                results.append(trained(batch(0)[0]))

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 15
    assert all(torch.equal(r, results[0]) for r in results)
    trained.unwrap()


def test_amsgrad_turned_on_after_wrapping_is_refused_with_a_cure():
    model = linears()
    optimizer = optimizer_of(model)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="1MiB", profile_path=None).to("cpu")
    square_loop(trained, optimizer, 0)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad is True"):
        square_loop(trained, optimizer, 1)
    trained.unwrap()


def test_the_models_own_config_and_optimizer_attributes_are_the_models():
    model = linears()
    model.config, model.optimizer = {"vocab": 3}, "mine"
    trained = AutoHeteWrapper(model, optimizer_of(model), gpu_mem="1MiB", profile_path=None)
    assert trained.config["vocab"] == 3
    assert trained.optimizer == "mine"


def test_a_trace_begun_before_the_plan_holds_what_came_after(tmp_path):
    model = make_gpt()
    optimizer = adamw(model)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="700KiB", profile_path=None).to("cpu")
    trained.trace()
    for step in range(4):
        plain_loop(trained, optimizer, step)
    trained.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    trained.unwrap()
    assert sum(event["name"].startswith("update") for event in events) > 0


UNWRAPPING = {
    "a forward hook": lambda block, call: block.register_forward_hook(call),
    "a backward hook": lambda block, call: block.out.register_full_backward_hook(call),
    "a gradient's hook": (
        lambda block, call: block.out.weight.register_post_accumulate_grad_hook(call)
    ),
}


@pytest.mark.parametrize("kind", ["all+c", "device"])
@pytest.mark.parametrize("where", UNWRAPPING)
def test_unwrapping_inside_a_pass_is_refused_and_training_goes_on(where, kind):
    expected = train(wrap=None, steps=3)
    model = make_gpt()
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="16MiB", plan=forced_plan(model, kind), profile_path=None
    ).to("cpu")
    said: list[str] = []

    def unwrap(*_):
        with pytest.raises(RuntimeError, match="unwrap: called from a hook inside") as error:
            trained.unwrap()
        said.append(str(error.value))

    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, 0)]
    hook = UNWRAPPING[where](model.blocks[1], unwrap)
    losses.append(plain_loop(trained, optimizer, 1))
    hook.remove()
    assert said
    losses.append(plain_loop(trained, optimizer, 2))
    trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), expected)


def test_unwrapping_after_a_pass_that_ended_in_an_exception_is_fine():
    for hook in UNWRAPPING.values():
        model = make_gpt()
        optimizer = adamw(model)
        trained = AutoHeteWrapper(
            model, optimizer, gpu_mem="16MiB", plan=forced_plan(model, "all"), profile_path=None
        ).to("cpu")

        def fail(*_):
            raise KeyError("the user's")

        hook(model.blocks[1], fail)
        with pytest.raises(KeyError):
            plain_loop(trained, optimizer, 0)
        assert trained.unwrap() is model


@pytest.mark.parametrize("plan", [None, "all"])
def test_a_model_without_parameters_runs(plan):
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    optimizer = CPUAdamW([{"params": []}])
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="1MiB", profile_path=None,
        plan=forced_plan(model, plan) if plan else None,
    ).to("cpu")  # fmt: skip
    for _ in range(4):
        x = torch.ones(3, requires_grad=True)
        trained(x).sum().backward()
        optimizer.step()
        torch.testing.assert_close(x.grad, 1 - torch.ones(3).tanh().square())
    assert "0" in str(trained.report())
    trained.unwrap()


def test_a_wrapped_container_has_its_length_and_any_wrapper_is_true():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trained = AutoHeteWrapper(model, optimizer_of(model), gpu_mem="1MiB")
    assert len(trained) == 2 and list(reversed(trained)) == [model[1], model[0]]
    other = make_gpt()
    wrapper = AutoHeteWrapper(other, adamw(other), gpu_mem="16MiB")
    assert wrapper
    with pytest.raises(TypeError, match="TinyGPT"):
        len(wrapper)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["all+c", "device"])
def test_a_default_device_does_not_reach_what_is_the_hosts(kind, half, tmp_path):
    """torch.set_default_device("cuda"), with the one that shows on any machine."""

    def build():
        model = make_gpt(dropout=0.0)
        return model.bfloat16() if half else model

    plain = build()
    reference = adamw(plain)
    data = [batch(step) for step in range(6)]

    def step_of(model, optimizer, number):
        loss = model(*data[number])
        with torch.device("meta"):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    expected = [step_of(plain, reference, step) for step in range(6)]
    losses = []
    for first in (0, 3):
        model = build()
        optimizer = adamw(model)
        with torch.device("meta"):
            trained = AutoHeteWrapper(
                model, optimizer, gpu_mem="16MiB", plan=forced_plan(model, kind), profile_path=None
            ).to("cpu")
            if first:
                trained.load_checkpoint(tmp_path / "run.pt")
        losses += [step_of(trained, optimizer, step) for step in range(first, first + 3)]
        with torch.device("meta"):
            trained.save_checkpoint(tmp_path / "run.pt")
            trained.unwrap()
    assert_bit_equal(Result(losses, model, optimizer), Result(expected, plain, reference))
