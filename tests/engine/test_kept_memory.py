"""Memory of gradients, parameters and state that somebody reaches not by the tensor itself."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, assert_bit_equal, forced_plan, plain_loop, train
from torch import Tensor, nn

from autohete import AutoHeteWrapper

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


# ------------------------------------------------------- plans that change, state that is replaced

TAKEN: dict[str, Callable[[Tensor], Any]] = {
    **KEPT,
    "data": lambda t: t.data,
    "an array of data": lambda t: t.data.numpy(),
}


def tensors_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *moments]


def taken_through_plans(handle: str) -> None:
    """Train under one plan after the other; read at every step what was taken before."""
    model = SMALL()
    optimizer = adamw(model)
    held = [p.detach().numpy() for p in model.parameters()]
    before = [h.copy() for h in held]
    plan = forced_plan(model, "all")
    keywords: dict[str, Any] = {"gpu_mem": "64MiB", "cpu_mem": "64MiB", "profile_path": None}
    trained = AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")
    assert all(np.array_equal(a, b) for a, b in zip(held, before, strict=True))
    sizes = []
    for step in range(12):
        plain_loop(trained, optimizer, step)
        trained.synchronize()
        if step < 4:
            held += [TAKEN[handle](t) for t in tensors_of(model, optimizer)]
        if step % 4 == 3:
            sizes.append(machine_bytes(trained))
        kind = ("device", "state", "device", "all")[step % 4]
        trained.run.plans._apply(forced_plan(model, kind))
        assert all(np.isfinite(torch.as_tensor(h).sum().item()) for h in held)
    assert sizes[1] == sizes[2], "memory that is known is kept once, however often plans change"
    trained.unwrap()
    plain_loop(model, optimizer, 12)
    assert all(np.isfinite(torch.as_tensor(h).sum().item()) for h in held)


def machine_bytes(trained: Any) -> int:
    machine = trained.run.side.machine
    return int(machine.host_used() + machine.device_used())


@pytest.mark.parametrize("handle", TAKEN)
def test_what_was_taken_before_the_plan_changes_can_be_read_ever_after(handle):
    """In a process of its own: what is not mapped any more ends it."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    body = f"import test_kept_memory as t; t.taken_through_plans({handle!r}); print('read')"
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_memory_that_nobody_knows_any_more_is_given_back_when_the_plan_changes():
    sizes = []
    for taken in (False, True):
        model = SMALL()
        optimizer = adamw(model)
        keywords: dict[str, Any] = {"gpu_mem": "64MiB", "cpu_mem": "64MiB", "profile_path": None}
        plan = forced_plan(model, "all")
        trained = AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")
        plain_loop(trained, optimizer, 0)
        trained.synchronize()
        held = [p.detach().numpy() for p in model.parameters()] if taken else []
        trained.run.plans._apply(forced_plan(model, "device"))
        with_it = machine_bytes(trained)
        held.clear()
        trained.run.plans._apply(forced_plan(model, "all"))
        trained.run.plans._apply(forced_plan(model, "device"))
        sizes.append((with_it, machine_bytes(trained)))
        trained.unwrap()
    assert sizes[0][0] < sizes[1][0]
    assert sizes[0][1] == sizes[1][1]


REPLACED: dict[str, Callable[[Any], Any]] = {
    "other tensors": lambda o: [
        s.update({k: s[k] * 0.5 for k in ("exp_avg", "exp_avg_sq")}) for s in o.state.values()
    ],
    "load_state_dict": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "cleared": lambda o: o.state.clear(),
}


@pytest.mark.parametrize("kind", ["all", "state", "device"])
@pytest.mark.parametrize("handle", ["its own array", "DLPack", "an array"])
@pytest.mark.parametrize("how", REPLACED)
def test_an_array_of_a_moment_that_is_replaced_keeps_its_values(how, handle, kind):
    def loop(model, optimizer, step, kept):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        if step in (1, 3):
            for p in model.parameters():
                state = optimizer.state[p]
                see(kept, (state["exp_avg"], state["exp_avg_sq"]))  # waits
                held = [KEPT[handle](state[k]) for k in ("exp_avg", "exp_avg_sq")]
                kept.setdefault("arrays", []).extend(held)
            held = state = None
            REPLACED[how](optimizer)
        see(kept, kept.get("arrays", []))
        optimizer.zero_grad()
        return loss.item()

    def then(model, kept):
        see(kept, kept["arrays"])

    same(loop, steps=7, then=then, plan=partial(forced_plan, kinds=kind))


def test_state_beside_some_that_was_kept_goes_where_the_next_plan_wants_it():
    def loop(model, optimizer, step, kept):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        if step == 1:
            arrays = [s["exp_avg"].numpy() for s in map(optimizer.state.get, model.parameters())]
            REPLACED["other tensors"](optimizer)
            kept["arrays"] = arrays
        if step in (2, 4) and hasattr(model, "run"):
            kind = {2: "device", 4: "all"}[step]
            model.run.plans._apply(forced_plan(model.module, kind))
        see(kept, kept.get("arrays", []))
        optimizer.zero_grad()
        return loss.item()

    same(loop, steps=8, plan=partial(forced_plan, kinds="all"))


def taken_from_a_model_that_is_garbage() -> None:
    """Nobody has called unwrap(), and what runs ahead of step() had two homes for the state."""
    model = SMALL()
    optimizer = adamw(model)
    keywords: dict[str, Any] = {"gpu_mem": "64MiB", "cpu_mem": "64MiB", "profile_path": None}
    plan = forced_plan(model, "all")
    trained = AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu")
    held = []
    for step in range(8):
        plain_loop(trained, optimizer, step)
        trained.synchronize()
        if step > 3:
            held += [torch.from_dlpack(s["exp_avg"]) for s in optimizer.state.values()]
    assert trained.run.engine.counters()["updates_ahead"] > 0
    run = weakref.ref(trained.run)
    del model, optimizer, trained
    gc.collect()
    assert run() is None
    assert all(torch.isfinite(h).all() for h in held)
    copies = [torch.full_like(h, 7.0) for h in held]  # given the same memory, if it were free
    assert all((h != c).any() for h, c in zip(held, copies, strict=True) if h.numel() > 1)


def test_what_was_taken_can_be_read_after_the_model_is_garbage():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    body = "import test_kept_memory as t; t.taken_from_a_model_that_is_garbage(); print('read')"
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
