"""Every refusal says where, what it got, what it expected; nothing stays half-attached."""

from __future__ import annotations

import copy
import re
from functools import cache

import pytest
import torch
from models import make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop
from torch import nn

from autohete import AutoHeteWrapper, InfeasibleError, load_profile
from autohete.guard import Guard
from autohete.hooks import HookedForward

STEPS = 3


def wrap(model, optimizer, **keywords):
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **keywords}
    return AutoHeteWrapper(model, optimizer, **keywords).to("cpu")


@cache
def reference() -> Result:
    model = make_gpt()
    return go_on(model, adamw(model))


def go_on(trained, optimizer, model=None) -> Result:
    torch.manual_seed(7)
    losses = [plain_loop(trained, optimizer, step) for step in range(STEPS)]
    return Result(losses, model or trained, optimizer)


def assert_nothing_attached(model, optimizer) -> None:
    for module in model.modules():
        assert not isinstance(vars(module).get("forward"), HookedForward)
    assert not any(isinstance(p, Guard) for p in model.parameters())
    assert "step" not in vars(optimizer)


def assert_trains_plainly_and_wraps_again(model, optimizer) -> None:
    assert_nothing_attached(model, optimizer)
    saved = copy.deepcopy(model.state_dict())
    assert_bit_equal(go_on(model, optimizer), reference())
    model.load_state_dict(saved)
    optimizer.state.clear()
    trained = wrap(model, optimizer)
    result = go_on(trained, optimizer, model)
    trained.unwrap()
    assert_bit_equal(result, reference())


REFUSED = {
    "gpu_mem too small": ({"gpu_mem": "4KiB"}, "gpu_mem is .*expected at least"),
    "gpu_mem just too small": ({"gpu_mem": 100_000}, "gpu_mem is .*expected at least"),
    "cpu_mem too small": ({"cpu_mem": "100KiB"}, "cpu_mem is .*expected at least"),
    "unknown unit": ({"gpu_mem": "16GBq"}, "gpu_mem is '16GBq': unknown unit 'GBq'"),
    "no number": ({"cpu_mem": "plenty"}, "cpu_mem is 'plenty', expected"),
    "negative": ({"gpu_mem": -5}, "gpu_mem is -5, expected"),
    "nan": ({"gpu_mem": float("nan")}, "gpu_mem is nan, expected"),
    "gpu_mem left out": ({"gpu_mem": None}, "gpu_mem is None, expected a size on the host device"),
    "strategy": ({"strategy": "zero"}, "strategy is 'zero', expected one of"),
    "precision": ({"precision": "int8"}, "precision is 'int8', expected one of"),
    "keyword": ({"gpu_memory": 5}, "gpu_memory"),
    "window": ({"window": 0}, "window is 0, expected"),
    "layers": ({"layers": "NoSuchBlock"}, "layers: 'NoSuchBlock' matches no module"),
    "nested layers": ({"layers": nn.Module}, "layers: .* matches modules inside each other"),
    "num_workers": ({"num_workers": 0}, "num_workers is 0, expected"),
    "max_grad_norm": ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0, expected"),
    "plan that is no plan": ({"plan": 5}, "plan is 5, expected a Plan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_be_honoured_is_refused_and_nothing_is_attached(case):
    keywords, message = REFUSED[case]
    model = make_gpt()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=message):
        wrap(model, optimizer, **keywords)
    assert_trains_plainly_and_wraps_again(model, optimizer)


def test_budgets_below_any_plan_raise_infeasible_error():
    for keywords in ({"gpu_mem": "4KiB"}, {"cpu_mem": "100KiB"}):
        model = make_gpt()
        with pytest.raises(InfeasibleError):
            wrap(model, adamw(model), **keywords)


def test_the_smallest_size_a_refusal_names_is_taken():
    """By the check before the first step; activations are not counted there."""
    model = make_gpt()
    with pytest.raises(InfeasibleError) as refused:
        wrap(model, adamw(model), gpu_mem="4KiB")
    needed = int(re.search(r"\((?:gpu|cpu)_mem=(\d+)\)", str(refused.value))[1])
    wrap(model, adamw(model), gpu_mem=needed).unwrap()
    with pytest.raises(InfeasibleError):
        wrap(model, adamw(model), gpu_mem=needed - 1)
    with pytest.raises(InfeasibleError) as refused:
        wrap(model, adamw(model), cpu_mem="4KiB")
    needed = int(re.search(r"\((?:gpu|cpu)_mem=(\d+)\)", str(refused.value))[1])
    wrap(model, adamw(model), cpu_mem=needed).unwrap()


def test_the_check_before_the_first_step_counts_the_slots_that_are_made():
    """One as large as the largest unit, one as the second largest."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8))
    with pytest.raises(InfeasibleError) as refused:
        wrap(model, adamw(model), gpu_mem=1)
    needed = int(str(refused.value).split("(gpu_mem=")[1].split(")")[0])
    gradients = 2048 + 256  # of the second layer, its bias included
    trained = wrap(model, adamw(model), gpu_mem=needed)
    assert trained.run.side.used() == needed - gradients
    trained.unwrap()


def test_a_host_that_is_full_half_way_through_wrapping_leaves_nothing_attached(monkeypatch):
    import autohete.run

    monkeypatch.setattr(autohete.run, "check_budgets", lambda *args: False)
    model = make_gpt()
    optimizer = adamw(model)
    with pytest.raises(torch.OutOfMemoryError, match="unit blocks"):
        wrap(model, optimizer, cpu_mem="500KiB")
    monkeypatch.undo()
    assert_trains_plainly_and_wraps_again(model, optimizer)


def test_a_device_that_is_full_when_the_slots_are_made_leaves_nothing_attached():
    model = make_gpt()
    optimizer = adamw(model)
    with pytest.raises(torch.OutOfMemoryError):
        wrap(model, optimizer, gpu_mem=400_000, plan=forced_plan(model, "device"))
    assert_trains_plainly_and_wraps_again(model, optimizer)


def test_an_optimizer_over_other_parameters_is_refused():
    model, other = make_gpt(), make_gpt(seed=1)
    with pytest.raises(ValueError, match="are not parameters of this TinyGPT"):
        wrap(model, adamw(other))
    assert_nothing_attached(model, adamw(model))
    with pytest.raises(ValueError, match="model is int, expected"):
        wrap(5, adamw(model))
    with pytest.raises(ValueError, match="optimizer is int, expected"):
        wrap(model, 5)


def test_wrapping_twice_is_refused_and_the_first_wrapper_trains_on():
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(model, optimizer)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(model, adamw(model))
    with pytest.raises(ValueError, match="is an AutoHeteWrapper already"):
        wrap(trained, optimizer)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(model.blocks, adamw(model.blocks))
    with pytest.raises(ValueError, match="not parameters of|stepped by another"):
        wrap(make_gpt(), optimizer)
    outer = nn.Sequential(model)
    with pytest.raises(ValueError, match="stepped by another|wrapped already"):
        wrap(outer, optimizer)
    with pytest.raises(ValueError, match="AutoHeteWrapper|wrapped already"):
        wrap(nn.Sequential(trained), adamw(model))
    result = go_on(trained, optimizer, model)
    trained.unwrap()
    assert_bit_equal(result, reference())


def test_the_same_optimizer_for_a_part_of_the_model_is_refused_while_it_is_stepped():
    both = nn.ModuleList([make_gpt(), make_gpt(seed=1)])
    optimizer = adamw(both)
    trained = wrap(both, optimizer)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap(both[0], optimizer)
    trained.unwrap()


def test_a_plan_of_another_model_is_refused():
    model = make_gpt()
    optimizer = adamw(model)
    other = forced_plan(make_gpt(layers=2), "state")
    with pytest.raises(ValueError, match="plan: it has 6 units, expected 8"):
        wrap(model, optimizer, plan=other)
    assert_trains_plainly_and_wraps_again(model, optimizer)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', "\x00\xff", '{"plan": {"units": [1, 2]}}']
)
def test_a_corrupt_plan_file_is_refused(text, tmp_path):
    path = tmp_path / "autohete_profile.json"
    path.write_text(text)
    model = make_gpt()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match="autohete_profile.json"):
        wrap(model, optimizer, plan=path)
    assert_nothing_attached(model, optimizer)


def test_a_plan_file_that_is_not_there_is_refused(tmp_path):
    model = make_gpt()
    optimizer = adamw(model)
    with pytest.raises((ValueError, FileNotFoundError), match=r"nowhere\.json"):
        wrap(model, optimizer, plan=tmp_path / "nowhere.json")
    assert_nothing_attached(model, optimizer)


def test_a_written_plan_file_is_read_back_and_trains_alike(tmp_path):
    path = tmp_path / "profile.json"
    results = []
    for keywords in ({"profile_path": path}, {"plan": str(path)}):
        model = make_gpt()
        optimizer = adamw(model)
        trained = wrap(model, optimizer, gpu_mem="600KiB", **keywords)
        results.append(go_on(trained, optimizer, model))
        plan = trained.plan
        trained.unwrap()
        assert [u.activations for u in plan.units] == [
            u.activations for u in load_profile(path)[1].units
        ]
    for result in results:
        assert_bit_equal(result, reference())


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16", "float"])
def test_a_conversion_after_wrapping_is_refused(convert):
    model = make_gpt() if convert != "float" else make_gpt().bfloat16()
    trained = wrap(model, adamw(model))
    with pytest.raises(ValueError, match="precision="):
        getattr(trained, convert)()
    with pytest.raises(ValueError, match="dtype is"):
        trained.to(torch.float64)
    trained.unwrap()


def test_a_model_without_repeated_layers_gets_units_by_module():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(self.second(torch.relu(self.first(x))) + x).square().mean()

    def run(wrapped):
        torch.manual_seed(0)
        model = Net()
        optimizer = adamw(model)
        trained = wrap(model, optimizer, gpu_mem="100KiB") if wrapped else model
        losses = []
        for step in range(4):
            loss = trained(torch.randn(8, 32, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if wrapped:
            assert [u.name for u in trained.run.units] == ["first", "second", "norm"]
            assert trained.plan is not None
            trained.unwrap()
        return Result(losses, model, optimizer)

    assert_bit_equal(run(True), run(False))


def test_methods_that_need_a_device_say_so():
    model = make_gpt()
    trained = AutoHeteWrapper(model, adamw(model), gpu_mem="16MiB")
    for method in (trained.report, trained.synchronize, trained.trace):
        with pytest.raises(RuntimeError, match="not on a device yet"):
            method()
    assert trained.unwrap() is model
