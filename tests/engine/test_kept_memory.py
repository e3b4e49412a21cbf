"""Memory of gradients, parameters and state that somebody reaches not by the tensor itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from models import batch, make_gpt
from oracle import assert_bit_equal, forced_plan, train
from torch import Tensor, nn

SMALL = partial(make_gpt, layers=2)


def same(loop: Callable[..., float], *, steps: int = 6, then: Any = None, **wrap: Any) -> None:
    """The loop, called with a dict of its own, gives plain PyTorch's bits, and the same `seen`."""
    runs = []
    for keywords in ({"plan": partial(forced_plan, kinds="all+c"), **wrap}, None):
        kept: dict[str, Any] = {"seen": []}
        result = train(
            wrap=keywords, steps=steps, build=SMALL,
            loop=lambda m, o, s, kept=kept: loop(m, o, s, kept),
        )  # fmt: skip
        if then is not None:
            then(result.model, kept)
        runs.append((result, kept["seen"]))
    (ours, seen), (reference, expected) = runs
    assert_bit_equal(ours, reference)
    assert len(seen) == len(expected)
    for a, b in zip(seen, expected, strict=True):
        assert torch.equal(a, b)


def see(kept: dict[str, Any], tensors: Any) -> None:
    kept["seen"] += [torch.as_tensor(t).detach().clone() for t in tensors]


# ------------------------------------------------------- handles that are gone before step()

HANDLES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "data": (lambda g: g.data, lambda h: h.mul_(0.5)),
    "an array": (lambda g: g.numpy(), lambda h: np.multiply(h, 0.5, out=h)),
    "DLPack": (lambda g: torch.from_dlpack(g), lambda h: h.mul_(0.5)),
    "an array by DLPack": (
        lambda g: torch.from_dlpack(g).numpy(), lambda h: np.multiply(h, 0.5, out=h),
    ),
    "the storage": (
        lambda g: g.untyped_storage(), lambda h: torch.empty(0).set_(h).mul_(0.5),
    ),
    "set_": (lambda g: torch.empty(0).set_(g), lambda h: h.mul_(0.5)),
}  # fmt: skip


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("handle", HANDLES)
def test_a_gradient_edited_through_a_handle_of_a_hook_that_is_gone_before_step(handle, set_to_none):
    take, edit = HANDLES[handle]

    def loop(model, optimizer, step, kept):
        if step == 0:
            kept["handles"] = []
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: kept["handles"].append(take(p.grad)))
        loss = model(*batch(step))
        loss.backward()
        if step % 2:
            for held in kept["handles"]:
                edit(held)
        kept["handles"].clear()
        held = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        return loss.item()

    same(loop)


def test_a_gradient_edited_through_a_handle_that_was_taken_steps_before():
    def loop(model, optimizer, step, kept):
        if step == 2:
            kept["handles"] = [p.grad.data for p in model.parameters()]
        loss = model(*batch(step))
        loss.backward()
        if step == 4:
            for held in kept.pop("handles"):
                held.mul_(0.5)
            held = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item()

    same(loop)


# ------------------------------------------------------- gradients of classes of their own


class OwnTensor(torch.Tensor):
    pass


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a parameter": lambda p: nn.Parameter(torch.zeros_like(p), requires_grad=False),
    "a class of the user's": lambda p: torch.zeros_like(p.data).as_subclass(OwnTensor),
}


@pytest.mark.parametrize("kept_until", ["before step", "after step"])
@pytest.mark.parametrize("own", OWN)
def test_a_gradient_of_a_class_of_its_own_is_read_and_edited_as_in_plain_training(own, kept_until):
    def loop(model, optimizer, step, kept):
        given = []
        for p in model.parameters():
            p.grad = OWN[own](p)
            given.append(p.grad)
        loss = model(*batch(step))
        loss.backward()
        see(kept, (g.data for g in given))
        if step % 2:
            for gradient in given:
                gradient.data.mul_(0.5)
        gradient = None
        if kept_until == "before step":
            given.clear()
        optimizer.step()
        for gradient in given:
            gradient.data.fill_(1e3)  # the update has read it
        optimizer.zero_grad()
        return loss.item()

    same(loop)


# ------------------------------------------------------- kept until much later

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "an array": lambda t: t.detach().numpy(),
    "its own array": lambda t: t.detach().numpy() if t.requires_grad else t.numpy(),
    "DLPack": lambda t: torch.from_dlpack(t.detach() if t.requires_grad else t),
    "DLPack of a detached one": lambda t: torch.from_dlpack(t.detach()),
}


@pytest.mark.parametrize("handle", KEPT)
def test_an_array_of_a_gradient_keeps_that_gradients_values(handle):
    def loop(model, optimizer, step, kept):
        see(kept, kept.setdefault("arrays", []))
        loss = model(*batch(step))
        loss.backward()
        if step in (1, 3):
            kept["arrays"] += [KEPT[handle](p.grad) for p in model.parameters()]
        optimizer.step()
        if step == 4:
            kept["arrays"] += [KEPT[handle](p.grad) for p in model.parameters()]
        see(kept, kept["arrays"])
        optimizer.zero_grad()
        return loss.item()

    same(loop, then=lambda model, kept: see(kept, kept["arrays"]))


@pytest.mark.parametrize("kind", ["all", "state", "device"])
@pytest.mark.parametrize("handle", KEPT)
def test_arrays_and_tensors_share_their_memory_after_unwrap(handle, kind):
    def loop(model, optimizer, step, kept):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        model.synchronize() if hasattr(model, "synchronize") else None
        if step == 3:
            for p in model.parameters():
                state = optimizer.state[p]
                tensors = [p, p.grad, state["exp_avg"], state["exp_avg_sq"]]
                kept.setdefault("arrays", []).extend(map(KEPT[handle], tensors))
        return loss.item()

    def then(model, kept):
        see(kept, kept["arrays"])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0)
                p.grad.mul_(2.0)
        see(kept, kept["arrays"])

    same(loop, steps=4, then=then, plan=partial(forced_plan, kinds=kind))


# ------------------------------------------------------- torch's modes


class Looking(torch.overrides.TorchFunctionMode):
    """Looks at parameters whenever somebody asks for an attribute."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "__get__":
            self.look()
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_newest_values_when_somebody_asks_for_a_gradient():
    def loop(model, optimizer, step, kept):
        parameters = list(model.parameters())
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        with Looking(lambda: see(kept, [p.sum() for p in parameters])):
            gradient = parameters[7].grad
        assert gradient is not None
        optimizer.zero_grad()
        return loss.item()

    same(loop)
