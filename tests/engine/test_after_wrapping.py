"""What users do to a model once it is wrapped: right, or refused in words at the earliest point."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from autohete import AutoHeteWrapper, CPUAdamW

KINDS = ("all+c", "state", "device")


def wrap(model: nn.Module, optimizer: Any, kind: str | None = "all+c") -> Any:
    plan = forced_plan(model, kind) if kind else None
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None}
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")


def same(loop: Callable[..., float], **keywords: Any) -> None:
    """The loop gives the bits of plain training, whatever the plan."""
    expected = train(wrap=None, steps=5, loop=loop, **keywords)
    for kind in KINDS:
        wrapped = {"plan": partial(forced_plan, kinds=kind)}
        assert_bit_equal(train(wrap=wrapped, steps=5, loop=loop, **keywords), expected)


def optimizer_of(model: nn.Module) -> CPUAdamW:
    return CPUAdamW(model.parameters(), lr=1e-2)


# ------------------------------------------------------------------- copies and averages


def test_an_averaged_model_follows_the_training():
    def run(wrapped: bool, whole: bool) -> list[Tensor]:
        model = make_gpt()
        optimizer = adamw(model)
        trained = wrap(model, optimizer) if wrapped else model
        average = AveragedModel(trained if whole else model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        torch.manual_seed(7)
        for step in range(4):
            plain_loop(trained, optimizer, step)
            average.update_parameters(trained)
        update_bn([], average)
        assert not isinstance(average.module, AutoHeteWrapper)
        with torch.no_grad():
            loss = average.eval()(*batch(9))
        return [loss, *average.module.state_dict().values(), *model.state_dict().values()]

    expected = run(False, True)
    for whole in (True, False):
        ours = run(True, whole)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_weights_exchanged_for_others_and_put_back_are_the_same_weights():
    """As averages are: by handing the parameters other memory, and their own again."""

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        backup = {name: p.data for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = backup[name] * 0.5
        with torch.no_grad():
            loss += model(*batch(step + 9)).item()
        for name, p in model.named_parameters():
            p.data = backup[name]
        return loss

    same(loop)


def test_state_kept_by_the_user_is_what_it_was_when_it_is_put_back():
    kept: dict[str, Any] = {}

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if step == 1:
            kept.update(optimizer.state_dict())
            optimizer.load_state_dict({**kept, "state": {}})
        if step == 3:
            optimizer.load_state_dict(kept)
        return loss

    same(loop)
    same(loop, build=lambda: make_gpt(layers=2).bfloat16())


def test_cleared_state_of_half_parameters_starts_from_fresh_masters():
    def loop(model, optimizer, step):
        if step == 2:
            optimizer.state.clear()
        return plain_loop(model, optimizer, step)

    same(loop, build=lambda: make_gpt(layers=2).bfloat16())


def test_copies_and_pickles_of_wrapper_and_optimizer_are_plain():
    model = make_gpt(dropout=0.0)
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, 0)
    for twin in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert type(twin) is type(model)
        assert all(
            torch.equal(p, q) for p, q in zip(twin.parameters(), model.parameters(), strict=True)
        )
    both = pickle.loads(pickle.dumps((trained, optimizer)))
    expected = copy.deepcopy((model, optimizer))
    for pair in (both, expected):
        plain_loop(*pair, 1)
    plain_loop(trained, optimizer, 1)
    for pair in (both, expected):
        assert all(
            torch.equal(p, q) for p, q in zip(pair[0].parameters(), model.parameters(), strict=True)
        )
    trained.unwrap()


# ------------------------------------------------------------------- inside a larger module


class Scaled(nn.Module):
    """A model of the user's around one that is wrapped, or is not."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.net(*inputs) * self.scale


def scaled_loop(outer: Scaled, optimizer: Any, rest: Any, step: int) -> float:
    loss = outer(*batch(step))
    loss.backward()
    optimizer.step()
    rest.step()
    optimizer.zero_grad()
    rest.zero_grad()
    return loss.item()


def test_a_wrapper_inside_a_larger_module_is_the_model_in_it():
    runs = []
    for wrapped in (False, True):
        model = make_gpt()
        optimizer = adamw(model)
        outer = Scaled(wrap(model, optimizer) if wrapped else model)
        rest = torch.optim.SGD([outer.scale], lr=0.1)
        torch.manual_seed(7)
        losses = [scaled_loop(outer, optimizer, rest, step) for step in range(5)]
        names = [name for name, _ in outer.named_parameters()]
        runs.append((losses, names, {k: v.clone() for k, v in outer.state_dict().items()}))
        if wrapped:
            assert outer.to("cpu") is outer
            assert outer.float() is outer
            with pytest.raises(ValueError, match="precision="):
                outer.half()
            with pytest.raises(ValueError, match="share_memory"):
                outer.share_memory()
            with pytest.raises(ValueError, match="not possible after wrapping"):
                outer.to_empty(device="cpu")
            outer.load_state_dict(runs[0][2])
            assert not outer.eval().net.module.blocks[0].training
            assert type(copy.deepcopy(outer).net) is type(model)
            outer.net.unwrap()
    (losses, names, state), (ours, our_names, our_state) = runs
    assert (ours, our_names) == (losses, names)
    assert list(our_state) == list(state)
    assert all(torch.equal(our_state[key], value) for key, value in state.items())


def test_a_larger_module_that_is_moved_before_the_first_step_attaches_nothing_by_staying():
    model = make_gpt()
    wrapper = AutoHeteWrapper(model, adamw(model), gpu_mem="16MiB", profile_path=None)
    outer = Scaled(wrapper)
    outer.to("cpu"), outer.float()
    assert wrapper.run is None
    with pytest.raises(ValueError, match=r"to: device is meta, expected cuda, or cpu"):
        outer.to("meta")
    assert wrapper.run is None


# ------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "share", [lambda m: m.share_memory(), lambda m: [p.share_memory_() for p in m.parameters()]]
)
def test_sharing_memory_is_refused_by_the_wrapper_or_at_the_next_forward(share):
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    plain_loop(trained, optimizer, 0)
    with pytest.raises(ValueError, match="share_memory"):
        trained.share_memory()
    share(model)
    with pytest.raises(ValueError, match=r"share_memory_\(\).*unwrap\(\) before sharing"):
        plain_loop(trained, optimizer, 1)


def test_memory_shared_before_wrapping_is_not_lost_to_who_reads_the_parameters():
    model = make_gpt().share_memory()
    expected = train(wrap=None, steps=3)
    result = train(wrap={}, steps=3, build=lambda: model)
    assert_bit_equal(result, expected)


def test_a_view_of_everything_is_given_back_as_parameters():
    """vector_to_parameters, with the vector dropped: its parameters share one storage."""

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if step % 2:
            vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
            nn.utils.vector_to_parameters(vector, model.parameters())
        return loss

    same(loop)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3))).square().mean()


def image_loop(model, optimizer, step):
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x)
    loss.backward()
    if step == 2:
        model.to(memory_format=torch.channels_last)  # between backward and step
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        for p in model.parameters():
            if p.dim() == 2:
                p.data = p.detach().t().contiguous().t()
    return loss.item()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_parameters_whose_layout_changes_keep_their_moments():
    def loop(model, optimizer, step):
        return image_loop(getattr(model, "module", model), optimizer, step)

    same(loop, build=net, optimizer=optimizer_of)


def test_a_parameter_that_is_part_of_a_tensor_somebody_holds_is_refused_at_wrapping():
    flat = torch.randn(2 * 16 * 16)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    for index, layer in enumerate(model):
        layer.weight.data = flat[index * 256 : (index + 1) * 256].view(16, 16)
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match=r"0\.weight is part of a larger tensor"):
        wrap(model, optimizer, None)
    del flat  # nobody can see the difference any more
    wrap(model, optimizer, None).unwrap()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before forward", "after backward"])
def test_a_flat_gradient_buffer_is_refused_in_words(kind, when):
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    plain_loop(trained, optimizer, 0)
    if when == "after backward":
        trained(*batch(0)).backward()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad = part.view(p.shape)
    with pytest.raises(ValueError, match="is part of a larger tensor .* held elsewhere"):
        trained(*batch(1)).backward() if when == "before forward" else optimizer.step()
    optimizer.zero_grad()
    plain_loop(trained, optimizer, 1)
    trained.unwrap()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_whose_memory_holds_the_negated_values_have_their_sign(kind):
    def loop(model, optimizer, step, negate):
        loss = model(*batch(step))
        loss.backward()
        for p in model.parameters():
            p.grad = negate(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    expected = train(wrap=None, steps=3, loop=partial(loop, negate=torch.neg))
    lazily = partial(loop, negate=lambda grad: torch._neg_view(grad.clone()))
    wrapped = {"plan": partial(forced_plan, kinds=kind)}
    assert_bit_equal(train(wrap=wrapped, steps=3, loop=lazily), expected)


class Joined(nn.Module):
    """Gradients that autograd cuts out of one tensor, and spreads out of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(4, 8) for _ in range(3)])
        self.offset = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat(list(self.parts)).t()).square().mean() + self.offset.sum()


def joined() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Joined())


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_that_autograd_makes_as_views_are_no_flat_buffers(by_hand):
    def loop(model, optimizer, step):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        for _ in range(2):
            loss = model(x)
            if not by_hand:
                loss.backward()
                continue
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            del gradients, gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    same(loop, build=joined, optimizer=optimizer_of)


# ------------------------------------------------------------------- modules


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrization_registered_and_removed_after_wrapping(kind):
    def loop(model, optimizer, step):
        block = model.blocks[1]
        if step == 1:
            parametrize.register_parametrization(block.up, "weight", Doubled())
        if step == 3:
            parametrize.remove_parametrizations(block.up, "weight")
        with parametrize.cached():
            return plain_loop(model, optimizer, step)

    wrapped = {"plan": partial(forced_plan, kinds=kind)}
    ours = train(wrap=wrapped, steps=5, loop=loop)
    assert_bit_equal(ours, train(wrap=None, steps=5, loop=loop))


def test_weights_tied_after_wrapping_train_as_one():
    def loop(model, optimizer, step):
        if step == 1:
            inner = getattr(model, "module", model)
            inner.head.weight = inner.tokens.weight
        return plain_loop(model, optimizer, step)

    same(loop)


transformers = pytest.importorskip("transformers")


def gpt2(tied: bool = True) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip


def hf_loop(model, optimizer, step):
    tokens = batch(step)[0].contiguous()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("tied", [True, False])
def test_tie_weights_after_wrapping(tied):
    def loop(model, optimizer, step):
        if step == 1:
            model.tie_weights()
        return hf_loop(model, optimizer, step)

    same(loop, build=partial(gpt2, tied))


@pytest.mark.parametrize("kind", KINDS)
def test_resized_token_embeddings_are_refused_in_words_at_the_next_forward(kind):
    model = gpt2()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, kind)
    hf_loop(trained, optimizer, 0)
    trained.resize_token_embeddings(60)
    with pytest.raises(ValueError, match=r"unwrap\(\) before|unwrap\(\)"):
        hf_loop(trained, optimizer, 1)


def test_what_is_registered_with_the_wrapper_is_registered_with_the_model():
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    trained.register_buffer("table", torch.ones(3))
    trained.register_buffer("scratch", torch.ones(3), persistent=False)
    trained.register_module("extra", nn.Linear(2, 2))
    trained.add_module("more", nn.Identity())
    trained.register_parameter("none", None)
    trained.plain = 5
    trained.adapter = nn.Linear(3, 3)
    assert model.table is trained.table and model.plain == 5
    assert {"table", "extra.weight", "adapter.bias"} <= model.state_dict().keys()
    assert "scratch" not in model.state_dict()
    assert trained.state_dict().keys() == model.state_dict().keys()
    assert trained.get_submodule("blocks.0.up") is model.blocks[0].up
    assert trained.get_parameter("blocks.0.up.weight") is model.blocks[0].up.weight
    assert trained.get_buffer("table") is model.table
    del trained.plain
    assert not hasattr(model, "plain")
    assert list(trained.children()) == list(model.children())
    plain_loop(trained, optimizer, 0)
    assert trained.unwrap() is model


def test_hooks_registered_with_the_wrapper_run_once():
    model = make_gpt()
    trained = wrap(model, adamw(model))
    calls: list[str] = []
    trained.register_forward_pre_hook(lambda *_: calls.append("before"))
    trained.register_forward_hook(lambda *_: calls.append("after"))
    trained.register_full_backward_hook(lambda *_: calls.append("backward"))
    trained(*batch(0)).backward()
    assert calls == ["before", "after", "backward"]
    trained.unwrap()


def test_a_wrapped_sequential_is_indexed_and_walked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trained = AutoHeteWrapper(model, optimizer_of(model), gpu_mem="1MiB", profile_path=None)
    assert trained[0] is model[0]
    assert list(trained) == list(model)


# ------------------------------------------------------------------- other wrappers


def test_ddp_around_a_wrapper_is_refused(tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_gpt()
        trained = wrap(model, adamw(model))
        with pytest.raises(ValueError, match="DistributedDataParallel was put around it"):
            DistributedDataParallel(trained)
        plain_loop(trained, trained._optimizer, 0)
        trained.unwrap()
    finally:
        dist.destroy_process_group()


COMPILED: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "the wrapper": lambda trained, compiled: compiled(trained),
    "the model": lambda trained, compiled: compiled(getattr(trained, "module", trained)),
    "a function around it": lambda trained, compiled: compiled(lambda *a: trained(*a)),
}


def compiled_run(where: str, kind: str | None, backend: str = "aot_eager") -> Result:
    torch._dynamo.reset()
    model = make_gpt(layers=2, dropout=0.0)
    optimizer = adamw(model)
    inner: Any = model
    if where == "the model, before wrapping":
        inner = torch.compile(model, backend=backend)
    if where == "layers, before wrapping":
        for block in model.blocks:
            block.compile(backend=backend)
    trained = wrap(inner, optimizer, kind) if kind else inner
    if where == "layers, after wrapping":
        for block in model.blocks:
            block.compile(backend=backend)
    called = trained
    if where in COMPILED:
        called = COMPILED[where](trained, partial(torch.compile, backend=backend))
    losses = []
    for step in range(4):
        loss = called(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if kind:
        assert trained.state_dict().keys() == inner.state_dict().keys()
        trained.unwrap()
    return Result(losses, model, optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "where",
    [*COMPILED, "the model, before wrapping", "layers, before wrapping", "layers, after wrapping"],
)
def test_torch_compile_before_and_after_wrapping_gives_the_plain_bits(where):
    expected = compiled_run(where, None)
    for kind in KINDS:
        assert_bit_equal(compiled_run(where, kind), expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["the wrapper", "layers, before wrapping"])
def test_inductors_code_gives_the_plain_losses_and_is_not_compiled_again(where):
    """Weights are not compared: Adam turns the rounding of gradients that are zero into steps."""
    from torch._dynamo.utils import counters

    expected = compiled_run(where, None, "inductor")
    ours = compiled_run(where, "all+c", "inductor")
    assert not counters["recompiles"]
    assert ours.losses == pytest.approx(expected.losses, rel=1e-4)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {}


def function(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    FUNCTIONS[run.__name__.replace("_", " ")] = run
    return run


@function
def functional_call_on_the_wrapper(trained: Any, model: Any) -> Any:
    return called_with_halves(trained, model)


@function
def functional_call_on_the_model(trained: Any, model: Any) -> Any:
    return called_with_halves(model, model)


def called_with_halves(called: Any, model: Any) -> Any:
    halves = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(called, halves, batch(1))
    loss.backward()
    return [loss, *(p.grad for p in halves.values())]


@function
def per_sample_gradients(trained: Any, model: Any) -> Any:
    values = {n: p.detach() for n, p in model.named_parameters()}

    def loss(values: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (tokens[None], targets[None]))

    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return list(gradient(values, *batch(1)).values())


@function
def vmap_over_the_wrapper(trained: Any, model: Any) -> Any:
    tokens = torch.stack([batch(i)[0] for i in range(3)])
    with torch.no_grad():
        return [torch.func.vmap(lambda x: trained(x))(tokens)]


@function
def jvp_through_two_blocks(trained: Any, model: Any) -> Any:
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    return torch.func.jvp(
        lambda y: model.blocks[1](model.blocks[0](y)), (x,), (torch.ones_like(x),)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func_right_after_a_step_gives_the_plain_bits(name, kind):
    results = []
    for wrapped in (False, True):
        model = make_gpt(layers=2, dropout=0.0)
        optimizer = adamw(model)
        trained = wrap(model, optimizer, kind) if wrapped else model
        plain_loop(trained, optimizer, 0)
        result = FUNCTIONS[name](trained, model)
        loss = plain_loop(trained, optimizer, 1)  # training goes on
        results.append([*result, torch.tensor(loss)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------- what an optimizer may hold


class Odd(nn.Module):
    """Frozen parameters of dtypes that no optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.whole = nn.Parameter(torch.arange(8), requires_grad=False)
        self.precise = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
        self.complex = nn.Parameter(torch.ones(8, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.whole * self.precise.float()
        return (x * self.complex.real).square().mean()


def odd() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Odd())


@pytest.mark.parametrize("make", [optimizer_of, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)])
def test_frozen_parameters_of_other_dtypes_may_be_in_the_optimizer(make):
    def loop(model, optimizer, step):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    same(loop, build=odd, optimizer=make)


def test_a_frozen_double_that_is_trained_after_all_is_refused_in_words():
    model = odd()
    optimizer = optimizer_of(model)
    trained = wrap(model, optimizer, None)
    model[0].precise.requires_grad_()
    trained(torch.ones(2, 8)).backward()
    with pytest.raises(ValueError, match="float64 and was frozen when it was wrapped"):
        optimizer.step()


def test_sparse_gradients_are_refused_at_wrapping():
    for module in (nn.Embedding(5, 4, sparse=True), nn.EmbeddingBag(5, 4, sparse=True)):
        model = nn.Sequential(module)
        with pytest.raises(ValueError, match="0 has sparse=True, expected dense gradients"):
            wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    frozen = nn.Sequential(nn.Embedding(5, 4, sparse=True).requires_grad_(False), nn.Linear(4, 4))
    wrap(frozen, optimizer_of(frozen), None).unwrap()


# ------------------------------------------------------------------- around the step


def a_group_removed(model: Any, optimizer: Any, step: int) -> float:
    if step == 2:
        optimizer.param_groups.pop()
    return plain_loop(model, optimizer, step)


def a_parameter_removed_and_added_again(model: Any, optimizer: Any, step: int) -> float:
    params = optimizer.param_groups[0]["params"]
    if step == 1:
        optimizer.left = params.pop(2)
    if step == 3:
        params.append(optimizer.left)
    return plain_loop(model, optimizer, step)


def a_parameter_in_another_group(model: Any, optimizer: Any, step: int) -> float:
    if step == 2:
        first, second = (group["params"] for group in optimizer.param_groups)
        second.append(first.pop(2))
    return plain_loop(model, optimizer, step)


def two_steps_after_one_backward(model: Any, optimizer: Any, step: int) -> float:
    loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gradients_swapped_between_layers(model: Any, optimizer: Any, step: int) -> float:
    loss = model(*batch(step))
    loss.backward()
    a, b = model.blocks[0].up.weight, model.blocks[1].up.weight
    a.grad, b.grad = b.grad, a.grad
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gradients_set_before_backward(model: Any, optimizer: Any, step: int) -> float:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    return plain_loop(model, optimizer, step)


def gradients_given_other_memory(model: Any, optimizer: Any, step: int) -> float:
    loss = model(*batch(step))
    loss.backward()
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def backward_for_some_inputs(model: Any, optimizer: Any, step: int) -> float:
    loss = model(*batch(step))
    loss.backward(inputs=list(model.parameters())[step::3])
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def moments_edited(model: Any, optimizer: Any, step: int) -> float:
    loss = plain_loop(model, optimizer, step)
    for number, p in enumerate(model.parameters()):
        state = optimizer.state[p]
        if number % 2:
            state["exp_avg"].mul_(0.5)
        else:
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
        if step == 2:
            state["step"].fill_(1.0)
        if step == 3:
            state["step"] = torch.tensor(7.0)
    return loss


def another_optimizer_beside_it(model: Any, optimizer: Any, step: int) -> float:
    if step == 0:
        optimizer.other = torch.optim.SGD(model.blocks[1].parameters(), lr=0.1, momentum=0.9)
    loss = model(*batch(step))
    loss.backward()
    optimizer.other.step()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def another_optimizer_in_its_place(model: Any, optimizer: Any, step: int) -> float:
    if step == 2:
        optimizer.other = CPUAdamW(model.parameters(), lr=1e-2)
    return plain_loop(model, optimizer if step < 2 else optimizer.other, step)


def a_layer_replaced_one_shared_one_added(model: Any, optimizer: Any, step: int) -> float:
    inner = getattr(model, "module", model)
    if step == 1:
        state = torch.get_rng_state()
        torch.manual_seed(5)
        inner.blocks[1].up = nn.Linear(32, 128)
        inner.blocks.append(copy.deepcopy(inner.blocks[0]))
        torch.set_rng_state(state)
    if step == 2:
        inner.blocks[2] = inner.blocks[0]
    if step == 3:
        del inner.blocks[1]
    return plain_loop(model, optimizer, step)


def saved_tensors_redirected(model: Any, optimizer: Any, step: int) -> float:
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def backward_in_another_thread(model: Any, optimizer: Any, step: int) -> float:
    loss = model(*batch(step))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


AROUND = (
    a_group_removed, a_parameter_removed_and_added_again, a_parameter_in_another_group,
    two_steps_after_one_backward, gradients_swapped_between_layers, gradients_set_before_backward,
    gradients_given_other_memory, backward_for_some_inputs, moments_edited,
    another_optimizer_beside_it, another_optimizer_in_its_place,
    a_layer_replaced_one_shared_one_added, saved_tensors_redirected, backward_in_another_thread,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("loop", AROUND, ids=lambda loop: loop.__name__.replace("_", " "))
def test_what_users_do_around_a_step_gives_the_bits_of_plain_training(loop):
    same(loop)
