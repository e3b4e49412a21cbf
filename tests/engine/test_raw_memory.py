"""Gradients and moments reached by other means than torch functions: what is done there counts.

A NumPy array, a storage, DLPack or C++ code works on the memory itself, and no guard hears of it.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from models import batch
from oracle import Result, adamw, assert_bit_equal, forced_plan, train
from test_early import SMALL, between, compare
from torch.utils.dlpack import from_dlpack, to_dlpack

from autohete import AutoHeteWrapper

pytestmark = pytest.mark.parametrize("early", [True, False])


def by_dlpack(model, optimizer, step):
    for p in model.parameters():
        from_dlpack(to_dlpack(p.grad)).mul_(0.5)


def by_pointer(model, optimizer, step):
    for p in model.parameters():
        gradient = p.grad
        values = (ctypes.c_float * gradient.numel()).from_address(gradient.data_ptr())
        values[0] = values[0] + 1.0


@pytest.mark.parametrize("edit", [by_dlpack, by_pointer])
def test_gradients_edited_below_torch_are_what_the_update_sees(edit, early):
    compare(between(edit), early_updates=early)


ALIASES = {
    "array": lambda gradient: gradient.numpy(),
    "storage": lambda gradient: torch.empty(0).set_(gradient.untyped_storage()),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_gradients_memory_taken_in_a_hook_stays_the_gradients(alias, early):
    held: dict[int, list[object]] = {}

    def watched(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: held.setdefault(id(model), []).append(ALIASES[alias](p.grad))
            )
        return model

    def edit(model, optimizer, step):
        for values in list(held.values()):
            for value in values:
                value *= 0.5
        held.clear()

    compare(between(edit), build=lambda: watched(SMALL()), early_updates=early)


@pytest.mark.parametrize("detached", [True, False])
def test_arrays_of_moments_that_are_kept_go_on_being_the_moments(detached, early):
    kept: dict[int, list[object]] = {}

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        loss = model(tokens, targets)
        loss.backward()
        for array in kept.get(id(optimizer), []):
            array *= 0.5
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, AutoHeteWrapper):
            model.synchronize()
        if step == 5:
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            kept[id(optimizer)] = [(m.detach() if detached else m).numpy() for m in moments]
        return loss.item()

    compare(loop, early_updates=early)


def test_a_compiled_function_of_the_users_may_edit_gradients(early):
    @torch.compile(backend="eager")
    def halve(gradients):
        for gradient in gradients:
            gradient.mul_(0.5)

    def edit(model, optimizer, step):
        halve([p.grad for p in model.parameters()])

    compare(between(edit), steps=6, early_updates=early)


def test_a_compiled_function_of_the_users_may_take_gradients_from_parameters(early):
    @torch.compile(backend="eager")
    def halve(parameters):
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    @torch.compile(backend="eager")
    def read(parameters):
        return sum(parameter.grad.abs().sum() for parameter in parameters)

    def edit(model, optimizer, step):
        parameters = list(model.parameters())
        read(parameters)
        if step % 2:
            halve(parameters)

    compare(between(edit), steps=8, early_updates=early)


def test_a_model_whose_wrapper_was_let_go_of_can_be_wrapped_again(early):
    model = SMALL()
    optimizer = adamw(model)

    def wrap():
        return AutoHeteWrapper(
            model, optimizer, gpu_mem="1GiB", plan=forced_plan(model, "all"), profile_path=None,
            early_updates=early,
        )  # fmt: skip

    torch.manual_seed(7)
    losses = []
    for start in (0, 4):
        wrapped = wrap()
        for step in range(start, start + 4):
            tokens, targets = batch(step)
            loss = wrapped(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        del wrapped
        gc.collect()
    last = wrap().to("cpu")
    last.unwrap()
    reference = train(wrap=None, steps=8, loop=between(lambda m, o, s: None), build=SMALL)
    assert_bit_equal(Result(losses, model, optimizer), reference)
