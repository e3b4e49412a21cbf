"""Every tensor the user can see points at valid, newest bytes, whatever is evicted or in flight."""

from __future__ import annotations

import copy
import io
import threading
from functools import partial

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw, forced_plan, plain_loop, train
from safetensors.torch import load_file, save_model
from torch import nn

from autohete import AutoHeteWrapper
from autohete._C import CopyDirection
from autohete.guard import Guard

EVERYTHING_OFFLOADED = partial(forced_plan, kinds="all+c")


def wrapped(kind="all+c", build=make_gpt, **keywords):
    model = build()
    optimizer = adamw(model)
    plan = forced_plan(model, kind)
    keywords = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **keywords}
    return AutoHeteWrapper(model, optimizer, plan=plan, **keywords).to("cpu"), optimizer


@pytest.fixture(scope="module")
def plain():
    return train(wrap=None, steps=2)


def after_two_steps(kind="all+c"):
    model, optimizer = wrapped(kind)
    torch.manual_seed(7)
    for step in range(2):
        plain_loop(model, optimizer, step)
    return model, optimizer


READERS = {
    "norm": lambda model, p, q: torch.equal(p.norm(), q.norm()),
    "print": lambda model, p, q: repr(p) == repr(q),
    "data": lambda model, p, q: torch.equal(p.data, q.data),
    "detach": lambda model, p, q: torch.equal(p.detach(), q.detach()),
    "numpy": lambda model, p, q: (p.detach().numpy() == q.detach().numpy()).all(),
    "tolist": lambda model, p, q: p.tolist() == q.tolist(),
    "index": lambda model, p, q: torch.equal(p[0], q[0]),
    "clone": lambda model, p, q: torch.equal(p.clone(), q.clone()),
    "foreach": lambda model, p, q: torch.equal(
        torch._foreach_norm([p])[0], torch._foreach_norm([q])[0]
    ),
    "arithmetic": lambda model, p, q: torch.equal(p * 2, q * 2),
    "deepcopy": lambda model, p, q: torch.equal(copy.deepcopy(p), q),
    "state_dict": lambda model, p, q: all(t.numel() > 0 for t in model.state_dict().values()),
    "vector": lambda model, p, q: torch.equal(
        nn.utils.parameters_to_vector([p]), nn.utils.parameters_to_vector([q])
    ),
    "torch.save": lambda model, p, q: torch.equal(reloaded(p), q),
}


def reloaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["all+c", "state"])
def test_a_bare_reference_right_after_step_reads_the_newest_value(plain, reader, kind):
    model, _ = after_two_steps(kind)
    pairs = list(zip(model.named_parameters(), plain.model.named_parameters(), strict=True))
    for (name, p), (_, q) in pairs:
        assert READERS[reader](model, p, q), f"{name} by {reader}"
    model.unwrap()


def test_the_guard_is_on_after_step_and_off_after_the_first_touch():
    model, _ = after_two_steps()
    p = model.module.blocks[0].qkv.weight
    assert isinstance(p, Guard) and isinstance(p, nn.Parameter)
    assert p.shape == (96, 32) and p.grad is None and isinstance(p, Guard), "metadata is free"
    p.norm()
    assert type(p) is nn.Parameter
    model.unwrap()


def test_moments_right_after_step_are_the_newest(plain):
    model, optimizer = after_two_steps()
    for p, q in zip(model.parameters(), plain.model.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[p][key], plain.optimizer.state[q][key])
    model.unwrap()


def test_state_dicts_of_model_and_optimizer_are_those_of_plain_training(plain):
    model, optimizer = after_two_steps()
    ours, expected = model.state_dict(), plain.model.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[k], expected[k]) for k in expected)
    a, b = optimizer.state_dict(), plain.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for index, state in b["state"].items():
        assert all(torch.equal(a["state"][index][key], state[key]) for key in state)
    model.unwrap()


def test_deepcopy_of_wrapper_and_module_is_a_plain_model(plain):
    model, _ = after_two_steps()
    for twin in (copy.deepcopy(model), copy.deepcopy(model.module)):
        assert "forward" not in vars(twin.blocks[0]) or not hasattr(twin.blocks[0].forward, "run")
        for p, q in zip(twin.parameters(), plain.model.parameters(), strict=True):
            assert type(p) is nn.Parameter and torch.equal(p, q)
        twin(*batch(0)).backward()
    assert all(p.grad is None for p in model.parameters()), "the original saw nothing"
    model.unwrap()


def test_evaluation_between_steps_uses_the_newest_weights(plain):
    model, _ = after_two_steps()
    model.eval()
    plain.model.eval()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert torch.equal(model(batch(9)[0]), plain.model(batch(9)[0]))
    model.unwrap()
    plain.model.train()


def greedy(model, tokens, count):
    with torch.no_grad():
        for _ in range(count):
            logits = model(tokens[:, -16:])[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens


def test_generation_between_steps_uses_the_newest_weights(plain):
    model, _ = after_two_steps()
    model.eval()
    plain.model.eval()
    assert torch.equal(greedy(model, batch(3)[0], 8), greedy(plain.model, batch(3)[0], 8))
    model.unwrap()
    plain.model.train()


def test_files_hold_every_key_at_plain_size(plain, tmp_path):
    model, _ = after_two_steps()
    weight = model.module.blocks[0].qkv.weight
    expected = plain.model.blocks[0].qkv.weight
    for name, value, reference in (
        ("model", model.state_dict(), plain.model.state_dict()),
        ("parameter", weight, expected),
    ):
        torch.save(value, tmp_path / f"{name}.ours")
        torch.save(reference, tmp_path / f"{name}.plain")
        ours, plains = (tmp_path / f"{name}.{s}" for s in ("ours", "plain"))
        assert ours.stat().st_size == pytest.approx(plains.stat().st_size, rel=0.01)
    save_model(model.module, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(saved[k], v) for k, v in plain.model.state_dict().items())
    model.unwrap()


def test_torch_save_of_the_whole_model_loads_as_a_plain_model(plain, tmp_path):
    model, _ = after_two_steps()
    torch.save(model.module, tmp_path / "whole.pt")
    twin = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(twin.eval()(batch(0)[0]), plain.model.eval()(batch(0)[0]))
    plain.model.train()
    model.unwrap()


@pytest.mark.parametrize("kind", ["all+c", "state", "device"])
@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.load_state_dict(make_gpt(seed=5).state_dict()),
        lambda m: [p.data.mul_(0.5) for p in m.parameters()],
        lambda m: [nn.init.constant_(p, 0.01) for p in m.blocks[1].parameters()],
        lambda m: m.blocks[2].up.weight.detach().numpy().fill(0.02),
        lambda m: setattr(m.blocks[0].out.weight, "data", torch.ones(32, 32) * 0.03),
        lambda m: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(m.parameters()) * 0.7, m.parameters()
        ),
    ],
    ids=["load_state_dict", "data", "init", "numpy", "p.data=x", "vector_to_parameters"],
)
def test_edits_between_steps_are_what_the_next_step_starts_from(kind, edit):
    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if step % 2 == 1:
            with torch.no_grad():
                edit(model)
        return loss

    reference = train(wrap=None, steps=5, loop=loop)
    ours = train(wrap={"plan": partial(forced_plan, kinds=kind)}, steps=5, loop=loop)
    assert ours.losses == reference.losses
    for p, q in zip(ours.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.optimizer.state[p][key], reference.optimizer.state[q][key])


def test_a_gradient_kept_by_the_user_keeps_its_values():
    kept = {}

    def loop(model, optimizer, step):
        tokens, targets = batch(step)
        model(tokens, targets).backward()
        kept[step] = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return 0.0

    train(wrap=None, steps=4, loop=loop)
    expected = kept.copy()
    kept.clear()
    train(wrap={"plan": EVERYTHING_OFFLOADED}, steps=4, loop=loop)
    for step in expected:
        assert all(torch.equal(a, b) for a, b in zip(kept[step], expected[step], strict=True))


LAST_BLOCK = 5  # unit index; units are positions, tokens, 4 blocks, norm, head


def test_backward_and_step_return_while_gradients_are_held():
    reference = train(wrap=None, steps=1)
    model, optimizer = wrapped({LAST_BLOCK: "state"})
    machine = model.run.side.machine
    torch.manual_seed(7)
    machine.hold(CopyDirection.DEVICE_TO_HOST)
    model(*batch(0)).backward()
    assert model.run.engine.unit_state(LAST_BLOCK)[1] == "leaving"
    optimizer.step()
    optimizer.zero_grad()
    assert model.run.engine.unit_state(LAST_BLOCK) == ("host", "committed")
    first = model.module.blocks[0].qkv.weight
    assert torch.equal(first, reference.model.blocks[0].qkv.weight), "other units are done"
    machine.release_all(CopyDirection.DEVICE_TO_HOST)
    for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(p, q)
    model.unwrap()


def test_compute_goes_on_while_copies_are_held_and_only_the_unit_concerned_waits():
    model, optimizer = wrapped({LAST_BLOCK: "state"})
    machine = model.run.side.machine
    reached, ended = threading.Event(), threading.Event()
    model.module.blocks[2].register_forward_hook(lambda *_: reached.set())

    def second_step():
        model(*batch(1))
        ended.set()

    plain_loop(model, optimizer, 0)
    model.synchronize()
    reached.clear()
    machine.hold(CopyDirection.HOST_TO_DEVICE)  # the update will not reach the device
    plain_backward(model, optimizer)
    worker = threading.Thread(target=second_step)
    reached.clear()
    worker.start()
    assert reached.wait(30), "the blocks before it computed"
    assert not ended.is_set()
    assert model.run.engine.unit_state(LAST_BLOCK)[0] in ("host", "uploading")
    machine.release_all(CopyDirection.HOST_TO_DEVICE)
    assert ended.wait(30), "and it goes on once its copy is let go"
    worker.join()
    model.unwrap()


def plain_backward(model, optimizer):
    model(*batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("seed", range(8))
def test_random_delays_change_no_bit(seed):
    reference = train(wrap=None, steps=3)

    def delays(model):
        model.run.side.machine.set_random_delays(seed, 2e-3)
        model.run.side.machine.set_poison(True)

    kind = ("all+c", "state", "all")[seed % 3]
    ours = train(
        wrap={"plan": partial(forced_plan, kinds=kind, window=1 + seed % 2)},
        steps=3,
        prepare=delays,
    )
    assert ours.losses == reference.losses
    for p, q in zip(ours.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.optimizer.state[p][key], reference.optimizer.state[q][key])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 208))
def test_200_runs_with_random_delays_change_no_bit(seed):
    test_random_delays_change_no_bit(seed)
