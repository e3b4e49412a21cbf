"""Blocks of every shape people write train to the bits of plain PyTorch, whatever the plan."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from models import Block, TinyGPT, batch, make_gpt
from oracle import Result, adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autohete import AutoHeteWrapper, CPUAdamW
from autohete._C import CopyDirection

STEPS = 5
BLOCK_0, HEAD = 2, 7  # unit indices of make_gpt()
PLANS: dict[str, dict[str, Any]] = {
    "all+c": {"plan": partial(forced_plan, kinds="all+c")},
    "all": {"plan": partial(forced_plan, kinds="all", window=1)},
    "state": {"plan": partial(forced_plan, kinds="state")},
    "planned": {"gpu_mem": "8MiB"},
}


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def lora_gpt() -> nn.Module:
    """A frozen base, adapters on two layers of each block: the first blocks' input needs none."""
    model = make_gpt(layers=3).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.down = LoRALinear(block.qkv), LoRALinear(block.down)
    return model


def lora_on_the_last_block() -> nn.Module:
    model = make_gpt(layers=3).requires_grad_(False)
    model.blocks[-1].qkv = LoRALinear(model.blocks[-1].qkv)
    return model


def frozen_embedding() -> nn.Module:
    model = make_gpt(layers=3)
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model


def frozen_middle() -> nn.Module:
    model = make_gpt(layers=3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].qkv.weight.requires_grad_(False)
    return model


@dataclass
class Out:
    hidden: Tensor
    extra: Any = None


def model_output(x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x * 1,))


# How a block takes its input and gives its output.
PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None), lambda out: out[0]),
    "dict": (lambda x: {"hidden": x, "count": 1}, lambda out: out["hidden"]),
    "dataclass": (Out, lambda out: out.hidden),
    "nested": (lambda x: Out(x, [{"more": (x * 2,)}]), lambda out: out.extra[0]["more"][0] / 2),
    "ModelOutput": (model_output, lambda out: out.last_hidden_state),
}


class PackedBlock(Block):
    def __init__(self, how: str) -> None:
        super().__init__(32, 4, 0.1)
        self.how = how

    def forward(self, *, hidden_states: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
        pack, unpack = PACKED[self.how]
        return pack(super().forward(unpack(hidden_states)) * scale)


class PackedGPT(TinyGPT):
    """Blocks take keyword-only inputs and pass containers from one to the next."""

    def __init__(self, how: str) -> None:
        super().__init__(layers=1)
        self.how = how
        self.blocks = nn.ModuleList([PackedBlock(how) for _ in range(3)])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        pack, unpack = PACKED[self.how]
        x = pack(self.tokens(tokens) + self.positions)
        for block in self.blocks:
            x = block(hidden_states=x, scale=0.9)
        logits = self.head(self.norm(unpack(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def packed_gpt(how: str) -> nn.Module:
    torch.manual_seed(0)
    return PackedGPT(how)


class InPlaceBlock(Block):
    """Writes to its own input before it computes; nothing saved the old value."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.9)
        return super().forward(x)


class BatchNormBlock(Block):
    """Buffers that the forward writes: running statistics, and a vector of power iteration."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout)
        self.statistics = nn.BatchNorm1d(width)
        self.out = nn.utils.parametrizations.spectral_norm(self.out)

    def forward(self, x: Tensor) -> Tensor:
        return self.statistics(super().forward(x).transpose(1, 2)).transpose(1, 2)


class CountingBlock(Block):
    """Writes to an object it was handed, as key-value caches are."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache.seen.append(super().forward(x))
        return sum(cache.seen) / len(cache.seen)


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


def with_a_cache(model: Any, x: Tensor) -> Tensor:
    cache = Cache()
    for block in model.blocks:
        x = block(x, cache=cache)
    return x


class WalkGPT(TinyGPT):
    """A GPT whose way through the blocks is a function."""

    def __init__(self, walk: Callable[[Any, Tensor], Tensor], block: type = Block) -> None:
        super().__init__(layers=1)
        self.blocks = nn.ModuleList([block(32, 4, 0.1) for _ in range(4)])
        self.walk = walk
        self.step = 0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        self.step += self.training
        x = self.walk(self, self.tokens(tokens) + self.positions)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_order(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def output_edited(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
        x.mul_(0.5)
        x += 0.1
        F.relu_(x[:, :1])
    return x


def some_skipped(model: Any, x: Tensor) -> Tensor:
    chance = random.Random(model.step)
    for block in model.blocks:
        if chance.random() < 0.6:
            x = block(x)
    return x


def reordered(model: Any, x: Tensor) -> Tensor:
    for index in random.Random(model.step).sample(range(4), 4):
        x = model.blocks[index](x)
    return x


def called_twice(model: Any, x: Tensor) -> Tensor:
    for block in (*model.blocks, *model.blocks, model.blocks[1], model.blocks[1]):
        x = x + 0.3 * block(x)
    return x


def two_branches(model: Any, x: Tensor) -> Tensor:
    left = model.blocks[1](model.blocks[0](x))
    right = model.blocks[3](model.blocks[2](x))
    return left * 0.5 + right * 0.5 + model.blocks[0](right)


def used_functionally(model: Any, x: Tensor) -> Tensor:
    """Block 2 is never called: its weights are used as they are, before and after others."""
    silent = model.blocks[2]
    x = F.linear(x, silent.out.weight, silent.out.bias)
    x = model.blocks[0](x) + F.linear(x, silent.qkv.weight[:32])
    x = model.blocks[3](model.blocks[1](x))
    return x + F.linear(x, silent.out.weight * 2)


def used_functionally_and_called(model: Any, x: Tensor) -> Tensor:
    x = F.linear(x, model.blocks[3].out.weight)
    x = in_order(model, x)
    return F.linear(x, model.blocks[0].out.weight)


def users_checkpoint(reentrant: bool, model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def users_checkpoint_over_two(reentrant: bool, model: Any, x: Tensor) -> Tensor:
    for i in (0, 2):
        x = checkpoint(
            lambda y, i=i: model.blocks[i + 1](model.blocks[i](y)), x, use_reentrant=reentrant
        )
    return x


def inner_eval(model: Any, x: Tensor) -> Tensor:
    """A teacher pass inside the forward, with and without a graph."""
    with torch.no_grad():
        target = in_order(model, x)
    return in_order(model, x) - 0.1 * target


def gpt_that_walks(walk: Callable[..., Tensor], block: type = Block) -> nn.Module:
    torch.manual_seed(0)
    return WalkGPT(walk, block)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": lora_gpt,
    "lora on the last block": lora_on_the_last_block,
    "frozen embedding": frozen_embedding,
    "frozen middle": frozen_middle,
    **{f"{how} outputs": partial(packed_gpt, how) for how in PACKED},
    "input edited inside": partial(gpt_that_walks, in_order, InPlaceBlock),
    "buffers written": partial(gpt_that_walks, in_order, BatchNormBlock),
    "with a cache": partial(gpt_that_walks, with_a_cache, CountingBlock),
    **{
        walk.__name__.replace("_", " "): partial(gpt_that_walks, walk)
        for walk in (
            output_edited, some_skipped, reordered, called_twice, two_branches, used_functionally,
            used_functionally_and_called, inner_eval,
        )
    },
    "reentrant checkpoint": partial(gpt_that_walks, partial(users_checkpoint, True)),
    "non-reentrant checkpoint": partial(gpt_that_walks, partial(users_checkpoint, False)),
    "reentrant over two": partial(gpt_that_walks, partial(users_checkpoint_over_two, True)),
    "non-reentrant over two": partial(gpt_that_walks, partial(users_checkpoint_over_two, False)),
}  # fmt: skip


@cache
def plain_model(name: str) -> Result:
    return train(wrap=None, steps=STEPS, build=MODELS[name])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_make_give_the_bits_of_plain_training(name, plan):
    ours = train(wrap=PLANS[plan], steps=STEPS, build=MODELS[name])
    assert_bit_equal(ours, plain_model(name))


# ------------------------------------------------------------------- loops


def two_backwards_over_one_graph(model, optimizer, step):
    loss = model(*batch(step))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def several_losses(model, optimizer, step):
    tokens, targets = batch(step)
    logits = model(tokens)
    first = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    second = logits.square().mean() * 0.01
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return first.item() + second.item()


def two_forwards_then_two_backwards(model, optimizer, step):
    first, second = model(*batch(2 * step)), model(*batch(2 * step + 1))
    first.backward()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return first.item() + second.item()


def two_forwards_one_backward(model, optimizer, step):
    loss = model(*batch(2 * step)) + model(*batch(2 * step + 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def other_branch_each_micro_batch(model, optimizer, step):
    total = 0.0
    for part in range(3):
        tokens, targets = batch(3 * step + part)
        x = model.tokens(tokens) + model.positions
        for index, block in enumerate(model.blocks):
            if index % 3 != part:
                x = block(x)
        logits = model.head(model.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def unfreezing(model, optimizer, step):
    """Block 0 joins at step 1, leaves at step 3; the embedding toggles every step."""
    model.blocks[0].requires_grad_(1 <= step < 3)
    model.tokens.requires_grad_(step % 2 == 0)
    return plain_loop(model, optimizer, step)


def requires_grad_off_after_backward(model, optimizer, step):
    loss = model(*batch(step))
    loss.backward()
    model.blocks[1].requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
    model.blocks[1].requires_grad_(True)
    return loss.item()


def every_zero_grad(model, optimizer, step):
    loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    if step == 0:
        optimizer.zero_grad(set_to_none=False)
    elif step == 1:
        model.zero_grad()
    elif step == 2:
        for p in model.parameters():
            p.grad = None
    elif step == 3:
        for p in model.parameters():
            p.grad.detach_().zero_()
    return loss.item()


def no_zero_grad(model, optimizer, step):
    loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    return loss.item()


def zero_grad_first(model, optimizer, step):
    loss = model(*batch(step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def closure(model, optimizer, step):
    def evaluate():
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        return loss

    return optimizer.step(evaluate).item()


def edited_gradients(model, optimizer, step):
    loss = model(*batch(step))
    loss.backward()
    for index, p in enumerate(model.parameters()):
        if index % 3 == 0:
            p.grad.mul_(0.5)
        elif index % 3 == 1:
            p.grad = p.grad * 2
        elif step == 1 and index % 6 == 2:
            p.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def autograd_grad(model, optimizer, step):
    parameters = list(model.parameters())
    loss = model(*batch(step))
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def evaluation_between(context, model, optimizer, step):
    loss = model(*batch(step))
    model.eval()
    with context():
        other = model(*batch(step + 100)).item()
    model.train()
    loss.backward()
    with context():
        other += model(*batch(step + 200)).item()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() + other


def skipped_backward(model, optimizer, step):
    """Forwards whose graph is thrown away, and a step without any backward."""
    model(*batch(step + 50))
    loss = model(*batch(step))
    if step != 2:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class PlannedError(Exception):
    pass


def fails_in_forward(model, optimizer, step):
    if step == 2:
        handle = model.blocks[2].up.register_forward_pre_hook(fail)
        with pytest.raises(PlannedError):
            model(*batch(step))
        handle.remove()
    return plain_loop(model, optimizer, step)


def fails_in_backward(model, optimizer, step):
    """The gradients that came before the failure stay, as they do in plain PyTorch."""
    if step == 2:
        handle = model.blocks[1].out.register_full_backward_hook(fail)
        loss = model(*batch(step))
        with pytest.raises(PlannedError):
            loss.backward()
        handle.remove()
    return plain_loop(model, optimizer, step)


def fails_in_backward_then_steps(model, optimizer, step):
    loss = model(*batch(step))
    if step == 2:
        handle = model.blocks[1].out.register_full_backward_hook(fail)
        loss = model(*batch(step))
        with pytest.raises(PlannedError):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def fails_in_loss(model, optimizer, step):
    logits = model(batch(step)[0])
    if step % 2:
        logits.register_hook(fail)
        with pytest.raises(PlannedError):
            logits.sum().backward()
        optimizer.zero_grad()
    return plain_loop(model, optimizer, step)


def fail(*_):
    raise PlannedError


def gradient_hooks(model, optimizer, step):
    """Tensor hooks and post-accumulate hooks of the user's own."""
    seen = []
    handles = [p.register_hook(lambda g: g * 0.5) for p in model.blocks[1].parameters()]
    handles += [
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
        for p in model.blocks[2].parameters()
    ]
    loss = plain_loop(model, optimizer, step)
    for handle in handles:
        handle.remove()
    return loss + sum(seen)


def module_hooks(model, optimizer, step):
    """Forward hooks that read and rewrite, full backward hooks that scale."""
    block = model.blocks[1]
    handles = [
        block.register_forward_hook(lambda m, args, out: out * 0.9 + m.out.weight.mean()),
        block.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,)),
        block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
    ]
    loss = plain_loop(model, optimizer, step)
    for handle in handles:
        handle.remove()
    return loss


def gradient_penalty(model, optimizer, step):
    """A double backward through all blocks."""
    tokens, targets = batch(step)
    x = (model.tokens(tokens) + model.positions).detach().requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y)
    logits = model.head(model.norm(y))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


LOOPS: dict[str, Callable[..., float]] = {
    loop.__name__.replace("_", " "): loop
    for loop in (
        two_backwards_over_one_graph, several_losses, two_forwards_then_two_backwards,
        two_forwards_one_backward, other_branch_each_micro_batch, unfreezing,
        requires_grad_off_after_backward, every_zero_grad, no_zero_grad, zero_grad_first, closure,
        edited_gradients, autograd_grad, skipped_backward, fails_in_forward, fails_in_backward,
        fails_in_backward_then_steps, fails_in_loss, gradient_hooks, module_hooks,
        gradient_penalty,
    )
} | {
    f"{context.__name__} between": partial(evaluation_between, context)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad)
}  # fmt: skip


@cache
def plain_loops(name: str) -> Result:
    return train(wrap=None, steps=STEPS, loop=LOOPS[name])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_every_make_give_the_bits_of_plain_training(name, plan):
    ours = train(wrap=PLANS[plan], steps=STEPS, loop=LOOPS[name])
    assert_bit_equal(ours, plain_loops(name))


def test_an_optimizer_over_the_adapters_alone_trains_them_and_leaves_the_base():
    def adapters(model):
        return adamw_of([p for p in model.parameters() if p.requires_grad])

    plain = train(wrap=None, steps=STEPS, build=lora_gpt, optimizer=adapters)
    for plan in PLANS.values():
        ours = train(wrap=plan, steps=STEPS, build=lora_gpt, optimizer=adapters)
        assert_bit_equal(ours, plain)


def adamw_of(parameters):
    return CPUAdamW(parameters, lr=3e-3)


def test_peft_adapters_train_to_the_bits_of_plain_training():
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    def build():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=3, n_head=4)
        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.1)
        return peft.get_peft_model(GPT2LMHeadModel(config), lora)

    def loop(model, optimizer, step):
        tokens, _ = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plain = train(wrap=None, steps=STEPS, build=build, loop=loop, optimizer=adamw)
    for plan in PLANS.values():
        ours = train(wrap=plan, steps=STEPS, build=build, loop=loop, optimizer=adamw)
        assert_bit_equal(ours, plain)


class AddBlock(nn.Module):
    """Saves nothing of its input, so plain PyTorch does not mind that it is edited."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return torch.tanh(value["x"] + self.bias)


def test_an_input_edited_after_a_recomputed_unit_raises_instead_of_giving_other_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(AddBlock(), AddBlock())
    optimizer = adamw_of(model.parameters())
    plan = forced_plan(model, "all+c")
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="8MiB", plan=plan).to("cpu")
    for step in range(2):
        x = torch.ones(2, 32)
        out = trained.module[0]({"x": x})
        if step == 0:
            x.mul_(2)
            with pytest.raises(RuntimeError, match="unit 0: an input was edited in place"):
                out.sum().backward()
        else:
            out.sum().backward()
            assert model[0].bias.grad.abs().sum() > 0
        optimizer.zero_grad()
    trained.unwrap()


def test_a_unit_in_the_users_hands_is_not_uploaded_until_they_are_done():
    """Another unit's update ends while the user edits this one."""
    model = make_gpt()
    model.blocks[0].requires_grad_(False)  # no update of its own to wait for
    optimizer = adamw(model)
    plan = forced_plan(model, {BLOCK_0: "all", HEAD: "all"})
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", plan=plan).to("cpu")
    machine = trained.run.side.machine
    machine.hold(CopyDirection.DEVICE_TO_HOST)
    trained(*batch(0)).backward()
    optimizer.step()
    values = model.blocks[0].qkv.weight.data  # settles the unit
    machine.release_all(CopyDirection.DEVICE_TO_HOST)
    model.head.weight.norm()  # its update is over, and has asked for the uploads that come next
    assert trained.run.engine.unit_state(BLOCK_0)[0] == "host"
    values.fill_(0.25)
    trained.eval()
    with torch.no_grad():
        edited = trained(batch(1)[0])
    trained.unwrap()
    assert torch.equal(model(batch(1)[0]), edited)


def test_the_unit_that_is_waited_for_is_uploaded_before_those_behind_it():
    """Units 0 and 1 still wait for their gradients when unit 2 has been updated."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    optimizer = adamw(model)
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="16MiB", plan=forced_plan(model, "all"), early_updates=False
    ).to("cpu")
    engine, machine = trained.run.engine, trained.run.side.machine

    def state(unit: int) -> str:
        return str(engine.unit_state(unit)[1])

    def hold(gradient: Tensor) -> None:
        while any(state(unit) == "leaving" for unit in (2, 3, 4)):
            continue
        machine.hold(CopyDirection.DEVICE_TO_HOST)

    def let_go() -> None:
        while state(4) != "idle":
            continue
        machine.release_all(CopyDirection.DEVICE_TO_HOST)

    hook = model[1].register_forward_hook(lambda module, _, out: out.register_hook(hold) and None)
    trained(torch.ones(2, 32)).sum().backward()
    hook.remove()
    engine.record_timeline(True)
    engine.set_update_rate(2e4)  # 50 ms: the next forward begins meanwhile
    optimizer.step()
    helper = threading.Thread(target=let_go)
    helper.start()
    trained(torch.ones(2, 32))
    helper.join()
    uploads = [span for span in engine.take_timeline() if span[2] == "upload"]
    trained.unwrap()
    assert min(uploads, key=lambda span: span[3])[1] == 0


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_unit_is_uploaded_during_the_backward_before_its_own():
    """With two slots: one computes, the other is filled."""
    model = nn.Sequential(*(TwoLayers() for _ in range(5)))
    optimizer = adamw(model)
    plan = forced_plan(model, "all")
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", plan=plan).to("cpu")
    seen = {}

    def look(unit: int, gradient: Tensor) -> None:
        seen[unit] = trained.run.engine.unit_state(unit - 1)[0]

    def watch(module: nn.Module, inputs: tuple[Tensor], out: Tensor, unit: int) -> None:
        out.register_hook(partial(look, unit))

    for unit in (1, 2, 3, 4):
        model[unit].first.register_forward_hook(partial(watch, unit=unit))
    trained(torch.ones(2, 32)).sum().backward()
    trained.unwrap()
    assert set(seen) == {1, 2, 3, 4}
    assert "host" not in seen.values()
