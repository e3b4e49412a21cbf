"""CPUAdamW: torch.optim.AdamW and Adam are the oracles."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autohete.optim import CPUSGD, CPUAdamW, CPULion

HALVES = [torch.bfloat16, torch.float16]


def params_of(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for shape in shapes]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def give_grads(params: list[nn.Parameter], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_grads(params, seed=step)
        optimizer.step()


def assert_close(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Compare parameters and every moment; steps are equal."""
    pairs = zip(
        [p for g in ours.param_groups for p in g["params"]],
        [p for g in theirs.param_groups for p in g["params"]],
        strict=True,
    )
    for p, q in pairs:
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        a, b = ours.state.get(p, {}), theirs.state.get(q, {})
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-7)


def bits_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(bits_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(bits_equal, a, b))
    return bool(a == b)


KWARGS: list[dict[str, Any]] = [
    {}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}, {"betas": (0.0, 0.0)},
    {"lr": 0.3, "weight_decay": 0.3}, {"eps": 1e-3}, {"betas": (0.5, 0.9)},
    {"lr": torch.tensor(0.01)},
]  # fmt: skip


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_fifty_steps_follow_torch(kwargs: dict[str, Any], decoupled: bool) -> None:
    params = params_of((33, 7), (5,), (), (0, 3), (1,), (2, 3, 4))
    theirs = copies(params)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = cls(theirs, **kwargs)
    kwargs = {"weight_decay": reference.defaults["weight_decay"], **kwargs}
    optimizer = CPUAdamW(params, decoupled_weight_decay=decoupled, **kwargs)
    train(optimizer, range(50))
    train(reference, range(50))
    assert_close(optimizer, reference)


def float64_first_step(param: Tensor, grad: Tensor) -> Tensor:
    p, g = param.detach().double(), grad.double()
    m, v = (1 - 0.9) * g, (1 - 0.999) * g * g
    p = p * (1 - 1e-3 * 1e-2)
    return (p - 1e-3 * (m / (1 - 0.9)) / ((v / (1 - 0.999)).sqrt() + 1e-8)).float()


def test_where_gradients_are_mostly_rounding_it_is_nearer_to_float64_than_torch() -> None:
    # What a layer norm puts out has a mean square of one: hardly any gradient is left.
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    model(torch.randn(4, 16, 64)).square().mean().backward()
    params = list(model.parameters())
    assert min(p.grad.abs().max() for p in params) < 1e-7

    def error(optimizer_class: Any, **keywords: Any) -> float:
        mine = copies(params)
        for p, q in zip(mine, params, strict=True):
            p.grad = q.grad.clone()
        optimizer_class(mine, lr=1e-3, **keywords).step()
        pairs = zip(mine, params, strict=True)
        wrong = [(p - float64_first_step(q, q.grad)).abs().sum().item() for p, q in pairs]
        return sum(wrong)

    assert error(CPUAdamW) < error(torch.optim.AdamW, fused=True) / 4
    assert error(CPUAdamW) < error(torch.optim.AdamW, foreach=True) / 4


def test_two_hundred_steps_with_a_large_decay_follow_torch() -> None:
    params = params_of((64,))
    theirs = copies(params)
    optimizer = CPUAdamW(params, lr=0.3, weight_decay=0.3)
    reference = torch.optim.AdamW(theirs, lr=0.3, weight_decay=0.3)
    train(optimizer, range(200))
    train(reference, range(200))
    assert_close(optimizer, reference)


def test_decoupled_decay_and_l2_give_the_values_of_hand_calculation() -> None:
    for decoupled, expected in ((True, [1.98, -4.06]), (False, [1.9, -4.1])):
        p = nn.Parameter(torch.tensor([2.0, -4.0]))
        p.grad = torch.tensor([0.0, 1.0])
        CPUAdamW([p], lr=0.1, weight_decay=0.1, decoupled_weight_decay=decoupled).step()
        torch.testing.assert_close(p.detach(), torch.tensor(expected))


def test_each_parameter_has_its_own_step() -> None:
    a, b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = CPUAdamW([a, b], lr=0.1, weight_decay=0.0)
    for t in range(3):
        a.grad = torch.ones(())
        b.grad = torch.ones(()) if t == 2 else None
        optimizer.step()
    assert optimizer.state[a]["step"] == 3 and optimizer.state[b]["step"] == 1
    torch.testing.assert_close(a.detach(), torch.tensor(-0.3))
    torch.testing.assert_close(b.detach(), torch.tensor(-0.1))


def test_a_parameter_without_gradient_is_left_alone_and_a_zero_gradient_is_not() -> None:
    a, b = params_of((3,), (3,))
    before = b.detach().clone()
    optimizer = CPUAdamW([a, b], lr=0.1, weight_decay=0.5)
    a.grad = torch.zeros(3)
    start = a.detach().clone()
    optimizer.step()
    torch.testing.assert_close(a.detach(), start * 0.95)
    assert torch.equal(b, before) and len(optimizer.state.get(b, {})) == 0


def test_groups_keep_their_order_and_their_own_settings() -> None:
    def groups(p: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": [p[3], p[0]], "weight_decay": 0.1},
            {"params": [p[1], p[4]], "weight_decay": 0.0},
            {"params": []},
            {"params": [p[2]], "lr": 0.05, "betas": (0.8, 0.95)},
        ]

    params = params_of((4, 4), (4,), (10, 4), (3, 4), (2,), (6,))
    theirs = copies(params)
    optimizer, reference = CPUAdamW(groups(params)), torch.optim.AdamW(groups(theirs))
    for o, p in ((optimizer, params), (reference, theirs)):
        train(o, range(2))
        o.add_param_group({"params": [p[5]], "lr": 0.2})
        train(o, range(2, 5))
        o.param_groups[0]["lr"] = 0.02
        train(o, range(5, 9))
    assert len(optimizer.param_groups) == 5
    assert_close(optimizer, reference)


# ---- layouts --------------------------------------------------------------------------------


def odd_layout(index: int, dtype: torch.dtype) -> Tensor:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)

    return [
        random(5, 7).t(),
        random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        random(8, 6)[:, ::2],
        random(10)[1::3],
        random(2, 1, 9),
        random(6, 4)[:, :1],
    ][index]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("grad_like", ["contiguous", "permuted", "expanded"])
def test_odd_layouts_of_parameter_and_gradient_give_the_contiguous_result(
    index: int, dtype: torch.dtype, grad_like: str
) -> None:
    storage = odd_layout(index, dtype)
    odd = nn.Parameter(storage)
    plain = nn.Parameter(storage.detach().contiguous().clone())
    for t in range(3):
        grad = torch.randn(odd.shape, generator=torch.Generator().manual_seed(t)).to(dtype)
        if grad_like == "expanded":
            grad = grad.flatten()[:1].reshape([1] * grad.dim()).expand(odd.shape)
        plain.grad = grad.contiguous()
        if grad_like == "permuted":
            order = list(range(grad.dim()))[::-1]
            grad = grad.permute(order).contiguous().permute(order)
        odd.grad = grad
        if t == 0:
            ours, reference = CPUAdamW([odd], lr=0.1), CPUAdamW([plain], lr=0.1)
        ours.step()
        reference.step()
    assert torch.equal(odd, plain)
    for key, value in reference.state[plain].items():
        assert torch.equal(ours.state[odd][key], value), key


def test_elements_between_those_of_a_strided_parameter_stay() -> None:
    storage = torch.arange(20.0)
    p = nn.Parameter(storage[1::3])
    p.grad = torch.ones_like(p)
    CPUAdamW([p], lr=1.0).step()
    untouched = [i for i in range(20) if i % 3 != 1]
    assert torch.equal(storage[untouched], torch.arange(20.0)[untouched])
    assert not torch.equal(storage[1::3], torch.arange(20.0)[1::3])


# ---- half parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_parameter_is_its_rounded_master_and_small_updates_add_up(
    dtype: torch.dtype,
) -> None:
    p = nn.Parameter(torch.ones(16, dtype=dtype))
    optimizer = CPUAdamW([p], lr=6e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.equal(p, optimizer.state[p]["master"].to(dtype))
    torch.testing.assert_close(p.float(), torch.full((16,), 0.94), rtol=0, atol=0.003)
    optimizer.param_groups[0].update(lr=1e-3, weight_decay=0.01)
    before = optimizer.state[p]["master"].clone()
    for _ in range(2000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert (optimizer.state[p]["master"] < before * 0.985).all()
    assert (p < 0.94).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_parameter_trains_as_an_fp32_one_that_starts_there_and_gets_its_gradients(
    dtype: torch.dtype,
) -> None:
    half = nn.Parameter(torch.randn(1000).to(dtype))
    full = nn.Parameter(half.detach().float())
    ours, reference = CPUAdamW([half]), CPUAdamW([full])
    for t in range(20):
        half.grad = torch.randn(1000, generator=torch.Generator().manual_seed(t)).to(dtype)
        full.grad = half.grad.float()
        ours.step()
        reference.step()
    assert torch.equal(ours.state[half]["master"], full)
    assert torch.equal(half, full.to(dtype))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[half][key], reference.state[full][key])


def test_values_edited_by_the_user_are_taken_up() -> None:
    p = nn.Parameter(torch.randn(100).bfloat16())
    optimizer = CPUAdamW([p], lr=1e-3, weight_decay=0.0)
    train(optimizer, range(3))
    new = torch.randn(100).bfloat16()
    p.data.copy_(new)
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)  # a zero gradient now moves nothing
    optimizer.step()
    assert torch.equal(p, new)
    assert torch.equal(optimizer.state[p]["master"].bfloat16(), new)


def test_a_parameter_that_changes_its_dtype_goes_on() -> None:
    p = nn.Parameter(torch.randn(10).bfloat16())
    optimizer = CPUAdamW([p])
    train(optimizer, range(2))
    p.data = p.data.float()
    train(optimizer, range(2, 4))
    assert "master" not in optimizer.state[p] and optimizer.state[p]["step"] == 4
    p.data = p.data.half()
    train(optimizer, range(4, 6))
    assert torch.equal(optimizer.state[p]["master"].half(), p)


# ---- saving and loading ---------------------------------------------------------------------


def roundtrip(state: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "deepcopy":
        return copy.deepcopy(state)
    if how == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return dict(torch.load(file, weights_only=True))
    return state


@pytest.mark.parametrize("how", ["itself", "deepcopy", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("already", [0, 3])
def test_resuming_gives_the_bits_of_never_having_stopped(
    how: str, dtype: torch.dtype, already: int
) -> None:
    def make() -> tuple[list[nn.Parameter], CPUAdamW]:
        params = [nn.Parameter(p.detach().to(dtype)) for p in params_of((50, 3), (7,))]
        return params, CPUAdamW(params, amsgrad=True)

    straight, reference = make()
    train(reference, range(12))
    first, before = make()
    train(before, range(7))
    second, after = make()
    train(after, range(100, 100 + already))
    with torch.no_grad():
        for a, b in zip(second, first, strict=True):
            a.copy_(b)
    after.load_state_dict(roundtrip(before.state_dict(), how))
    assert bits_equal(after.state_dict(), before.state_dict())
    assert after.state[second[0]]["exp_avg"].dtype == torch.float32
    train(after, range(7, 12))
    assert bits_equal([p.detach() for p in second], [p.detach() for p in straight])
    assert bits_equal(after.state_dict(), reference.state_dict())
    assert before.state[first[0]]["step"] == 7  # and shares nothing with what it was loaded from


RESUME = """
import sys, torch
from autohete.optim import CPUAdamW
saved = torch.load(sys.argv[1], weights_only=True)
p = torch.nn.Parameter(saved["p"])
optimizer = CPUAdamW([p])
optimizer.load_state_dict(saved["optimizer"])
for step in range(7, 12):
    p.grad = torch.randn(40, generator=torch.Generator().manual_seed(step)).bfloat16()
    optimizer.step()
torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, sys.argv[1])
"""


def test_resuming_in_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    p = nn.Parameter(torch.randn(40).bfloat16())
    optimizer = CPUAdamW([p])
    train(optimizer, range(7))
    file = tmp_path / "saved.pt"
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, file)
    subprocess.run([sys.executable, "-c", RESUME, str(file)], check=True)
    train(optimizer, range(7, 12))
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["p"], p)
    assert bits_equal(saved["optimizer"], optimizer.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_state_dicts_go_to_torch_and_back(fused: bool) -> None:
    params = params_of((20, 3), (5,))
    theirs = copies(params)
    ours, reference = CPUAdamW(params, amsgrad=True), torch.optim.AdamW(theirs, amsgrad=True)
    train(ours, range(4))
    train(reference, range(4))
    assert ours.state_dict()["param_groups"] == reference.state_dict()["param_groups"]
    assert ours.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    for a, b in zip(
        ours.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True
    ):
        assert list(a) == list(b)
        assert all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a)
    crossed = torch.optim.AdamW(copies(params), fused=fused)
    crossed.load_state_dict(copy.deepcopy(ours.state_dict()))
    back = CPUAdamW(copies(theirs))
    back.load_state_dict(copy.deepcopy(reference.state_dict()))
    for optimizer in (ours, reference, crossed, back):
        train(optimizer, range(4, 8))
    assert_close(crossed, reference)
    assert_close(back, reference)


def test_bf16_moments_of_torch_are_widened_on_loading() -> None:
    params = [nn.Parameter(p.detach().bfloat16()) for p in params_of((30,))]
    theirs = copies(params)
    reference = torch.optim.AdamW(theirs)
    train(reference, range(2))
    optimizer = CPUAdamW(params)
    optimizer.load_state_dict(reference.state_dict())
    state = optimizer.state[params[0]]
    assert torch.equal(state["exp_avg"], reference.state[theirs[0]]["exp_avg"].float())
    train(optimizer, range(2, 3))
    assert state["step"] == 3 and torch.equal(state["master"].bfloat16(), params[0])


def test_a_step_number_lower_than_the_current_one_is_accepted_and_huge_ones_stay_exact() -> None:
    (p,) = params_of((4,))
    optimizer = CPUAdamW([p])
    train(optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    for step in (torch.tensor(2.0), torch.tensor(2.0**24), 2**24 + 1, 7):
        saved["state"][0]["step"] = step
        optimizer.load_state_dict(saved)
        train(optimizer, range(2))
        assert int(optimizer.state[p]["step"].item()) == int(step) + 2


def test_a_state_dict_of_other_shapes_is_refused_and_nothing_is_loaded() -> None:
    other = CPUAdamW(params_of((4, 5), (3,)))
    train(other, range(2))
    params = params_of((4, 5), (7,))
    optimizer = CPUAdamW(params, lr=0.5)
    train(optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"exp_avg .* has shape \(3,\), expected .* \(7,\)"):
        optimizer.load_state_dict(other.state_dict())
    assert bits_equal(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    "other",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.RMSprop(params),
        lambda params: torch.optim.Adagrad(params),
    ],
    ids=["sgd", "rmsprop", "adagrad"],
)
def test_a_state_dict_of_another_rule_is_refused_and_nothing_is_loaded(other: Any) -> None:
    params = params_of((4, 5), (3,))
    theirs = other(copies(params))
    train(theirs, range(2))
    optimizer = CPUAdamW(params, lr=0.5)
    train(optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="has .* and no exp_avg and no exp_avg_sq, expected"):
        optimizer.load_state_dict(theirs.state_dict())
    assert bits_equal(optimizer.state_dict(), before)


def test_pickles_and_deep_copies_go_on_alike() -> None:
    params = params_of((9,))
    optimizer = CPUAdamW(params, num_workers=1, lr=0.1)
    train(optimizer, range(2))
    twin_params, twin = copy.deepcopy((params, optimizer))
    train(optimizer, range(2, 4))
    train(twin, range(2, 4))
    assert torch.equal(params[0], twin.param_groups[0]["params"][0])


# ---- values that are negated where they are read ----------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("cls", [CPUAdamW, CPUSGD, CPULion])
def test_gradients_of_a_complex_model_have_their_sign(cls: Any, shape: tuple[int, ...]) -> None:
    ends = []
    for plain in (True, False):
        p = nn.Parameter(torch.ones(shape))
        optimizer = cls([p], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            value = torch.complex(torch.zeros(shape), p)
            (value.conj() * torch.tensor(2 + 3j * (step + 1))).real.sum().backward()
            assert p.grad is not None
            if plain:
                p.grad = p.grad.clone()
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)
    assert (ends[0] < 1).all()  # its gradient is positive


def test_autograd_leaves_such_a_gradient() -> None:
    p = nn.Parameter(torch.ones(()))
    (torch.complex(torch.zeros(()), p).conj() * torch.tensor(2 + 3j)).real.backward()
    assert p.grad is not None
    assert p.grad.is_neg()  # or the test above says nothing


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_parameter_whose_memory_holds_negated_values_is_updated_as_torch_does(
    dtype: torch.dtype,
) -> None:
    stored = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    ours, theirs = nn.Parameter(torch._neg_view(stored)), nn.Parameter(-stored)
    optimizers = CPUAdamW([ours], lr=0.1), CPUAdamW([theirs], lr=0.1)
    for optimizer in optimizers:
        train(optimizer, range(4))
    assert torch.equal(ours, theirs)
    assert torch.equal(stored, -theirs.detach())


# ---- how it is called -----------------------------------------------------------------------


def test_a_closure_runs_with_gradients_enabled_and_its_loss_is_returned() -> None:
    (p,) = params_of((4,))
    optimizer = CPUAdamW([p], lr=0.1)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert calls == [first.item(), second.item()] and second < first


def test_a_backward_over_a_graph_from_before_the_step_raises() -> None:
    (p,) = params_of((4,))
    optimizer = CPUAdamW([p])
    loss = (p**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_schedulers_accept_it_and_set_its_rate() -> None:
    (p,) = params_of((1,))
    optimizer = CPUAdamW([p], lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    start = p.item()
    for moved in (1.0, 1.5, 1.75):
        p.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert p.item() == pytest.approx(start - moved, abs=1e-5)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_works_as_with_torchs_fused_optimizer(unscale: bool) -> None:
    def run(make: Any) -> tuple[list[float], Tensor, Any]:
        p = nn.Parameter(torch.ones(8))
        optimizer = make([p], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scales = []
        for t in range(6):
            optimizer.zero_grad()
            x = torch.full((8,), float("inf")) if t in (1, 2) else torch.arange(1.0, 9.0)
            scaler.scale((p * x).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p], 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, p.detach(), optimizer.state[p]["step"]

    ours = run(CPUAdamW)
    theirs = run(lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True))
    assert ours[0] == theirs[0] == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
    assert ours[2] == theirs[2] == 4


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0, expected"), ({"lr": float("nan")}, "lr is nan, expected"),
        ({"lr": "x"}, "lr is 'x', expected a number"), ({"eps": None}, "eps is None, expected a n"),
        ({"betas": (0.9, "x")}, "betas is 'x', expected a number"),
        ({"eps": -1.0}, "eps is"), ({"eps": float("nan")}, "eps is nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\] is nan"),
        ({"weight_decay": -0.1}, "weight_decay is"), ({"lr": torch.zeros(2)}, "lr has 2 elements"),
        ({"capturable": True}, "capturable is True"), ({"num_workers": 0}, "num_workers is 0"),
        ({"differentiable": True}, "differentiable is True"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\), expected two"),
        ({"betas": (0.9, 0.9, 0.9)}, "betas is .*, expected two numbers"),
        ({"betas": None}, "betas is None, expected two"),
        ({"num_workers": 1.5}, "num_workers is 1.5, expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
    ],
)  # fmt: skip
def test_bad_hyper_parameters_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUAdamW(params_of((2,)), **kwargs)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_is_named_and_nothing_moves(scale: float) -> None:
    (p,) = params_of((4,))
    optimizer = CPUAdamW([p])
    give_grads([p], 0)
    before = p.detach().clone()
    optimizer.grad_scale = torch.tensor(scale)
    with pytest.raises(ValueError, match=f"grad_scale is {scale}, expected a finite number > 0"):
        optimizer.step()
    assert torch.equal(p, before)


def test_hyper_parameters_that_become_bad_later_are_named_before_anything_moves() -> None:
    a, b = params_of((2,), (2,))
    optimizer = CPUAdamW([{"params": [a]}, {"params": [b]}])
    give_grads([a, b], 0)
    before = a.detach().clone()
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    assert torch.equal(a, before) and not optimizer.state


def test_parameters_and_gradients_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a parameter is torch.float64, expected float32"):
        CPUAdamW([nn.Parameter(torch.zeros(2).double())])
    (p,) = params_of((3,))
    optimizer = CPUAdamW([p])
    p.grad = torch.eye(3)[0].to_sparse()
    with pytest.raises(ValueError, match="grad is Sparse, expected a dense"):
        optimizer.step()
    meta = nn.Parameter(torch.zeros(2, device="meta"))
    meta.grad = torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="expected a tensor on cpu"):
        CPUAdamW([meta]).step()


def test_parameters_that_share_memory_are_refused_and_nothing_moves() -> None:
    storage = torch.ones(20)
    params = [nn.Parameter(storage[:12]), nn.Parameter(storage[8:])]
    optimizer = CPUAdamW(params)
    give_grads(params, 0)
    with pytest.raises(ValueError, match="param overlaps the param of another update"):
        optimizer.step()
    assert torch.equal(storage, torch.ones(20))


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_shared_between_parameters_is_refused_and_nothing_moves(key: str) -> None:
    params = params_of((12,), (12,))
    optimizer = CPUAdamW(params)
    train(optimizer, range(1))
    optimizer.state[params[1]][key] = optimizer.state[params[0]][key]
    before = copy.deepcopy(optimizer.state_dict()), copies(params)
    give_grads(params, 1)
    with pytest.raises(ValueError, match=f"{key} overlaps the {key} of another update"):
        optimizer.step()
    assert bits_equal(optimizer.state_dict(), before[0])
    assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))


def test_a_gradient_in_the_memory_of_another_parameter_is_refused() -> None:
    params = params_of((12,), (12,))
    before = copies(params)
    optimizer = CPUAdamW(params)
    params[0].grad, params[1].grad = params[1].detach(), torch.ones(12)
    with pytest.raises(ValueError, match="grad overlaps the param of another update"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_parameters_may_share_one_gradient() -> None:
    ours, theirs = params_of((12,), (12,)), params_of((12,), (12,))
    optimizer, oracle = CPUAdamW(ours), torch.optim.AdamW(theirs)
    for _ in range(3):
        grad = torch.randn(12)
        for p in (*ours, *theirs):
            p.grad = grad
        optimizer.step()
        oracle.step()
    assert_close(optimizer, oracle)


def test_a_refused_group_is_not_added() -> None:
    optimizer = CPUAdamW(params_of((2,)))
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": params_of((3,)), "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_a_step_count_that_is_a_number_is_counted_on():
    ends = []
    for count in (5, torch.tensor(5.0)):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer = CPUAdamW([p], lr=0.1)
        for step in range(4):
            p.grad = torch.full((4,), 1.0 + step)
            if step == 2:
                optimizer.state[p]["step"] = count
            optimizer.step()
        ends.append((p.detach().clone(), optimizer.state[p]["step"]))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1] == 7
