"""Training on a GPU gives the bits of plain training on that GPU."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from gpu_oracle import assert_equal_to_plain, gpu_batch, gpu_loop, train_plain, train_wrapped
from models import make_gpt
from oracle import adamw
from torch import nn

STEPS = 20
KINDS = ("state", "all", "state+c", "all+c")
CYCLES = 200_000_000  # a tenth of a second, about: long against everything else here


@cache
def plain():
    return train_plain(STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_unit_placed_alike_gives_the_bits_of_plain_training(kind):
    assert_equal_to_plain(train_wrapped(STEPS, kind), plain())


@pytest.mark.parametrize("window", [1, 3])
def test_any_window_gives_the_bits_of_plain_training(window):
    from oracle import forced_plan

    model_plan = partial(forced_plan, kinds="all+c", window=window)
    ours = train_wrapped(STEPS, None, plan=model_plan(make_gpt()))
    assert_equal_to_plain(ours, plain())


def test_units_that_stay_on_the_gpu_give_the_bits_of_torchs_own_foreach_adamw():
    def torch_adamw(model):
        groups = adamw(model).param_groups
        return torch.optim.AdamW(
            [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups],
            lr=3e-3,
            foreach=True,
        )

    model = make_gpt().cuda()
    optimizer = torch_adamw(model)
    torch.manual_seed(7)
    losses = [gpu_loop(model, optimizer, step) for step in range(STEPS)]
    ours = train_wrapped(STEPS, "device", optimizer=torch_adamw)
    assert ours.losses == losses
    for p, q in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.cpu())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.optimizer.state[p][key].cpu(), optimizer.state[q][key].cpu())


@pytest.mark.parametrize("kind", ["state", "all+c"])
def test_bf16_parameters_give_the_bits_of_plain_training(kind):
    def build():
        return make_gpt(layers=2).bfloat16()

    assert_equal_to_plain(train_wrapped(10, kind, build=build), train_plain(10, build=build))


def accumulating_loop(model, optimizer, step):
    total = 0.0
    for part in range(3):
        loss = model(*gpu_batch(3 * step + part)) / 3
        torch.cuda._sleep(CYCLES // 10)  # the sum on the host is still to come when step() runs
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_give_the_bits_of_plain_training(kind):
    ours = train_wrapped(4, kind, loop=accumulating_loop)
    assert_equal_to_plain(ours, train_plain(4, loop=accumulating_loop))


def clipping_loop(model, optimizer, step):
    loss = model(*gpu_batch(step))
    loss.backward()
    torch.cuda._sleep(CYCLES // 10)  # clipping is still queued when step() runs
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_gradients_give_the_bits_of_plain_training(kind):
    ours = train_wrapped(6, kind, loop=clipping_loop)
    assert_equal_to_plain(ours, train_plain(6, loop=clipping_loop))


def editing_loop(model, optimizer, step):
    loss = gpu_loop(model, optimizer, step)
    torch.cuda._sleep(CYCLES // 10)  # the edit is still queued when the next forward begins
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_edits_still_queued_are_what_the_next_step_starts_from(kind):
    ours = train_wrapped(6, kind, loop=editing_loop)
    assert_equal_to_plain(ours, train_plain(6, loop=editing_loop))


@pytest.mark.parametrize("kind", ["state", "all+c"])
def test_a_stream_of_the_users_own_gives_the_bits_of_plain_training(kind):
    stream = torch.cuda.Stream()

    def loop(model, optimizer, step):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            loss = gpu_loop(model, optimizer, step)
        torch.cuda.default_stream().wait_stream(stream)
        return loss

    assert_equal_to_plain(train_wrapped(STEPS, kind, loop=loop), plain())


def test_updates_and_uploads_go_on_while_the_compute_stream_is_busy():
    from oracle import forced_plan

    from autohete import AutoHeteWrapper

    model = make_gpt()
    optimizer = adamw(model)
    plan = forced_plan(model, "all+c")
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="2GiB", cpu_mem="1GiB", plan=plan, profile_path=None
    ).cuda()
    gpu_loop(wrapped, optimizer, 0)
    wrapped(*gpu_batch(1)).backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(30 * CYCLES)
    optimizer.step()
    wrapped.synchronize()
    assert not torch.cuda.current_stream().query(), "the update waited for the compute stream"
    wrapped.unwrap("cpu")
