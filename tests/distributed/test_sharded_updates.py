"""ShardedUpdates: models sharded by fully_shard, updated beside the next forward."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from loops import Setup, full, hash_of, part
from ranks import run
from test_fully_shard import EPS, ours, sharded, torchs
from torch import nn

from autohete import CPUSGD, CPUAdamW, CPULion, ShardedUpdates
from autohete.guard import Guard
from autohete.optim.base import ReadUpdate
from autohete.sharded_updates import _Unit

STEPS = 4
RULES: dict[str, Callable[[Any], Any]] = {
    "AdamW": ours,
    "bf16 moments": lambda p: CPUAdamW(p, lr=1e-2, eps=EPS, moment_dtype=torch.bfloat16),
    "Lion": lambda p: CPULion(p, lr=1e-3),
    "SGD": lambda p: CPUSGD(p, lr=1e-2, momentum=0.9),
    "plain SGD": lambda p: CPUSGD(p, lr=1e-2),
    "reversed": lambda p: ours(list(p)[::-1]),
}


def trained(
    rank: int, size: int, rule: str, beside: bool, *, prefetch: bool = False, **model_options: Any
) -> dict[str, Any]:
    """A run's numbers: two micro-batches a step, clipped, the learning rate falling."""
    model = sharded(size, **model_options)
    optimizer = RULES[rule](model.parameters())
    updates = ShardedUpdates(model, optimizer) if beside else None
    if prefetch:
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms, hashes = [], [], []
    for step in range(STEPS):
        for micro in (0, 1):
            loss = model(*part(Setup(), step, micro, rank)) / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 2:  # else the next forward is the first to touch anything
            hashes.append(hash_of(everything(model, optimizer)))
    if updates is not None:
        updates.remove()
    tensors = [t.clone() for t in everything(model, optimizer)]
    return {"losses": losses, "norms": norms, "hashes": hashes, "tensors": tensors}


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Weights and state, as this rank has them."""
    tensors = []
    for p in model.parameters():
        shown = [p, *(v for _, v in sorted(optimizer.state.get(p, {}).items()))]
        tensors += [v.to_local() if hasattr(v, "to_local") else v for v in shown]
    return [tensor.detach() for tensor in tensors]


def with_and_without(rank: int, size: int, cases: list[Any]) -> list[Any]:
    return [
        [trained(rank, size, rule, beside, **options) for beside in (True, False)]
        for rule, options in cases
    ]


QUICK: list[Any] = [("reversed", {}), ("SGD", {}), ("AdamW", {"prefetch": True})]
MORE: list[Any] = [*((rule, {}) for rule in RULES), ("AdamW", {"bf16": True})]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, QUICK), *(pytest.param(n, MORE, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_updates_beside_forward_give_the_bits_of_the_optimizer_by_itself(size: int, cases: Any):
    for results in run(size, with_and_without, cases):
        for case, (beside, alone) in zip(cases, results, strict=True):
            for series in ("losses", "norms", "hashes"):
                assert beside[series] == alone[series], (case, series)
            for a, b in zip(beside["tensors"], alone["tensors"], strict=True):
                assert torch.equal(a, b) and a.dtype == b.dtype, case


class Gates:
    """Holds every update of an optimizer until its gate, by number, is opened."""

    def __init__(self, optimizer: Any, log: list[str]) -> None:
        self.begun = 0
        self._open = [threading.Event() for _ in range(100)]
        make = optimizer._call

        def call(workers: Any, values: Any) -> None:
            number, self.begun = self.begun, self.begun + 1
            assert self._open[number].wait(30), f"nobody opened gate {number}"
            make(workers, values)
            log.append(f"update {number}")

        optimizer._call = call

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self._open[number].set()

    def open_all(self) -> None:
        self.open(*range(100))


def order_of_events(rank: int, size: int) -> tuple[list[str], list[str]]:
    model = sharded(size)
    optimizer = RULES["reversed"](model.parameters())
    updates = ShardedUpdates(model, optimizer)
    log: list[str] = []
    gates = Gates(optimizer, log)
    model(*part(Setup(), 0, 0, rank)).backward()
    optimizer.step()
    log.append("step returned")
    optimizer.zero_grad()
    log.append("zeroed")
    for number, block in enumerate(model.blocks):

        def ran(*_: Any, number: int = number) -> None:
            log.append(f"block {number}")
            gates.open(number + 2)  # of the unit that comes next

        block.register_forward_hook(ran)
    gates.open(0, 1)  # of what the model itself has, and of the first block
    model(*part(Setup(), 1, 0, rank))
    return log, updates.order


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    """What each of two ranks finds in the cases of one process each: starting them takes long."""
    return run(2, in_turn)


def in_turn(rank: int, size: int) -> dict[str, Any]:
    cases = (
        order_of_events,
        skipped,
        failing,
        gone_on,
        refused_step,
        removed,
        refused,
        two_optimizers,
    )
    return {case.__name__: case(rank, size) for case in (*cases, partly_frozen_both)}


def test_step_returns_at_once_and_each_unit_of_the_next_forward_waits_for_itself_alone(
    on_two_ranks: Any,
):
    for log, order in (found["order_of_events"] for found in on_two_ranks):
        assert order == ["the model", "blocks.0", "blocks.1"]
        assert log[:2] == ["step returned", "zeroed"]
        # Were more waited for, the gates would stay shut, and the run would end with an error.
        assert [e for e in log if "update" in e] == ["update 0", "update 1", "update 2"]
        assert log.index("update 1") < log.index("block 0") < log.index("update 2")
        assert log.index("update 2") < log.index("block 1")


READERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "full_tensor": lambda m, o, p: p.full_tensor(),
    "to_local": lambda m, o, p: p.to_local(),
    "to_local without gradients": lambda m, o, p: torch.no_grad()(p.to_local)(),
    "the local tensor": lambda m, o, p: p._local_tensor,
    "arithmetic": lambda m, o, p: (p * 2).to_local(),
    "the norm": lambda m, o, p: p.norm().full_tensor(),
    "a list": lambda m, o, p: torch._foreach_norm([p])[0].full_tensor(),
    "data": lambda m, o, p: p.data.to_local(),
    "detached": lambda m, o, p: p.detach().to_local(),
    "an edit": lambda m, o, p: torch.no_grad()(p.mul_)(2.0).to_local(),
    "a copy": lambda m, o, p: (setattr(p, "grad", None), copy.deepcopy(p).to_local())[1],
    "state_dict": lambda m, o, p: m.state_dict()["blocks.1.up.weight"].to_local(),
    "unshard": lambda m, o, p: unsharded(m),
    "a moment": lambda m, o, p: o.state[p]["exp_avg"].to_local(),
    "a whole moment": lambda m, o, p: o.state[p]["exp_avg_sq"].full_tensor(),
    "stacked moments": lambda m, o, p: torch.stack(
        [o.state[p]["exp_avg"], o.state[p]["exp_avg_sq"]]
    ).to_local(),
    "the count": lambda m, o, p: o.state[p]["step"].item(),
    "the optimizer's state_dict": lambda m, o, p: [
        s["exp_avg"].to_local() for s in o.state_dict()["state"].values()
    ][-1],
    "a copied optimizer": lambda m, o, p: copied(o).state_dict()["state"][0]["step"],
    "torch's state dicts": lambda m, o, p: of_torch(m, o),
    "loading": lambda m, o, p: loaded(m, p),
    "a gradient's edit": lambda m, o, p: p.grad.mul_(3.0).to_local(),
    "gradients zeroed in place": lambda m, o, p: (o.zero_grad(set_to_none=False), p.to_local())[1],
}


def unsharded(model: Any) -> torch.Tensor:
    block = model.blocks[1]
    block.unshard()
    value = block.up.weight.detach().clone()
    block.reshard()
    return value


def copied(optimizer: Any) -> Any:
    optimizer.zero_grad()  # torch cannot copy a DTensor that has a gradient
    return copy.deepcopy(optimizer)


def of_torch(model: Any, optimizer: Any) -> torch.Tensor:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    moments = state["state"]["blocks.1.up.weight"]
    return torch.cat([weights["blocks.1.up.weight"].to_local(), moments["exp_avg"].to_local()])


def loaded(model: Any, p: Any) -> torch.Tensor:
    local: torch.Tensor = model.blocks[1].up.weight.to_local().clone()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    return local


def read(rank: int, size: int, beside: bool) -> dict[str, Any]:
    """What every reader sees right after step(), while the updates are held."""
    values = {}
    for name, reader in READERS.items():
        model = sharded(size)
        optimizer = ours(model.parameters())
        if beside:
            updates = ShardedUpdates(model, optimizer)
            gates = Gates(optimizer, [])
            for unit in updates._units:  # who does not wait for a unit sees old values
                opening(unit, gates)
        model(*part(Setup(), 0, 0, rank)).backward()
        optimizer.step()
        p = model.blocks[1].up.weight
        value = reader(model, optimizer, p)
        values[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        if beside:
            gates.open_all()
            updates.remove()
    return values


def opening(unit: Any, gates: Gates) -> None:
    """Open all gates when somebody begins to wait for the unit."""
    result = unit._result
    unit._result = lambda update: (gates.open_all(), result(update))[1]


def test_whoever_reads_or_writes_after_step_waits_for_the_newest_values():
    for mine, plain in zip(run(2, read, True), run(2, read, False), strict=True):
        for name in READERS:
            if isinstance(plain[name], torch.Tensor):
                assert torch.equal(mine[name], plain[name]), name
            else:
                assert mine[name] == plain[name], name


def skipped(rank: int, size: int) -> list[Any]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    updates = ShardedUpdates(model, optimizer)
    model(*part(Setup(), 0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [t.clone() for t in everything(model, optimizer)]
    model(*part(Setup(), 1, 0, rank)).backward()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.ones(1)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    optimizer.zero_grad()
    optimizer.step()  # and one without any gradient
    updates.synchronize()
    return [before, everything(model, optimizer)]


def test_a_skipped_step_and_one_without_gradients_change_nothing(on_two_ranks: Any):
    for before, after in (found["skipped"] for found in on_two_ranks):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b)


def failing(rank: int, size: int) -> list[str]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    updates = ShardedUpdates(model, optimizer)
    fail_once(optimizer)
    model(*part(Setup(), 0, 0, rank)).backward()
    optimizer.step()
    model.head.weight.to_local()  # of another unit, which is well
    messages = []
    for touch in (
        lambda: model.blocks[0].up.weight.to_local(),
        lambda: model(*part(Setup(), 1, 0, rank)),
        optimizer.step,
        updates.synchronize,
    ):
        with pytest.raises(RuntimeError) as error:
            touch()
        messages.append(str(error.value))
    return messages


def gone_on(rank: int, size: int) -> list[Any]:
    """Steps, one of them failing in an update, from a checkpoint again; and without a failure."""
    return [gone_on_by(rank, size, first) for first in ("nothing fails", "read", "load", "remove")]


def gone_on_by(rank: int, size: int, first: str) -> list[torch.Tensor]:
    model, setup = sharded(size), Setup()
    optimizer = ours(model.parameters())
    updates = ShardedUpdates(model, optimizer)
    model(*part(setup, 0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = [p.to_local().detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    if first != "nothing fails":
        fail_once(optimizer)
        model(*part(setup, 7, 0, rank)).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"update of .* failed \(no room\)"):
            {
                "read": lambda: [p.to_local() for p in model.parameters()],
                "load": lambda: optimizer.load_state_dict(state),
                "remove": updates.remove,
            }[first]()
        if first == "remove":
            updates.remove()
            updates = ShardedUpdates(model, optimizer)
        for p, value in zip(model.parameters(), saved, strict=True):
            p.to_local().detach().copy_(value)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
    model(*part(setup, 1, 0, rank)).backward()
    optimizer.step()
    updates.remove()
    return [t.clone() for t in everything(model, optimizer)]


def fail_once(optimizer: Any) -> None:
    make, calls = optimizer._call, []

    def call(workers: Any, values: Any) -> None:
        calls.append(values)
        if len(calls) == 2:
            raise MemoryError("no room")
        make(workers, values)

    optimizer._call = call


def test_after_a_failed_update_was_raised_training_goes_on_from_a_checkpoint(on_two_ranks: Any):
    for expected, *others in (found["gone_on"] for found in on_two_ranks):
        for found in others:
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b)


def test_an_update_that_fails_raises_wherever_its_unit_is_touched(on_two_ranks: Any):
    for messages in (found["failing"] for found in on_two_ranks):
        for message in messages:
            assert "the update of blocks.0 failed (no room)" in message
            assert "go on from a checkpoint" in message


def refused_step(rank: int, size: int) -> list[Any]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    ShardedUpdates(model, optimizer)
    model(*part(Setup(), 0, 0, rank)).backward()
    before = [full(p) for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.step()
    return [before, [full(p) for p in model.parameters()]]


def test_a_step_that_is_refused_has_begun_nothing(on_two_ranks: Any):
    for before, after in (found["refused_step"] for found in on_two_ranks):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b)


def removed(rank: int, size: int) -> list[bool]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    log: list[str] = []
    for _ in range(2):
        updates = ShardedUpdates(model, optimizer)
        model(*part(Setup(), 0, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.remove()
    Gates(optimizer, log).open_all()
    model(*part(Setup(), 1, 0, rank)).backward()
    optimizer.step()
    return [log == ["update 0"], all(type(p).__name__ == "DTensor" for p in model.parameters())]


def test_after_remove_step_updates_by_itself_again(on_two_ranks: Any):
    assert [found["removed"] for found in on_two_ranks] == [[True, True]] * 2


def partly_frozen(rank: int, size: int, beside: bool) -> list[torch.Tensor]:
    """A frozen unit, one that forward may leave out, and parameters that are not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model: Any = nn.Sequential(*layers)
    policy = CPUOffloadPolicy(pin_memory=False)
    mesh = init_device_mesh("cpu", (size,))
    layers[1].requires_grad_(False)
    for layer in layers[:3]:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    ignored = set(layers[3].parameters())
    fully_shard(model, mesh=mesh, offload_policy=policy, ignored_params=ignored)
    optimizer = ours(model.parameters())
    if beside:
        ShardedUpdates(model, optimizer)
    for step in range(4):
        x = torch.full((2, 8), step + 1.0)
        for index, layer in enumerate(model):
            if index != 2 or step % 2:
                x = layer(x)
        x.square().sum().backward()
        for p in ignored:
            torch.distributed.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return [t.clone() for t in everything(model, optimizer)]


def partly_frozen_both(rank: int, size: int) -> list[list[torch.Tensor]]:
    return [partly_frozen(rank, size, True), partly_frozen(rank, size, False)]


def test_frozen_units_left_out_units_and_unsharded_parameters_are_right(on_two_ranks: Any):
    for beside, alone in (found["partly_frozen_both"] for found in on_two_ranks):
        for a, b in zip(beside, alone, strict=True):
            assert torch.equal(a, b)


def refused(rank: int, size: int) -> list[str]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    plain = nn.Linear(2, 2)
    messages = []
    ShardedUpdates(model, optimizer)
    for make in (
        lambda: ShardedUpdates(model, torchs(model.parameters())),
        lambda: ShardedUpdates(plain, ours(plain.parameters())),
        lambda: ShardedUpdates(model, ours(plain.parameters())),
        lambda: ShardedUpdates(model, optimizer),
    ):
        with pytest.raises(ValueError) as error:
            make()
        messages.append(str(error.value))
    return messages


def test_what_it_cannot_update_is_refused_and_says_what_to_do(on_two_ranks: Any):
    parts = ["CPUAdamW takes the arg", "AutoHeteWrapper is for", "after fully_shard", "remove() th"]
    for messages in (found["refused"] for found in on_two_ranks):
        for message, part_of_it in zip(messages, parts, strict=True):
            assert part_of_it in message


def two_optimizers(rank: int, size: int) -> list[list[torch.Tensor]]:
    """What gathering by hand sees while each optimizer's update of a unit is held."""
    seen = []
    for beside in (False, True):
        model = sharded(size)
        parameters = list(model.parameters())
        optimizers = [ours(parameters[::2]), ours(parameters[1::2])]
        held = []
        for optimizer in optimizers if beside else []:
            updates = ShardedUpdates(model, optimizer)
            held.append((updates, Gates(optimizer, [])))
            for unit in updates._units:
                opening(unit, held[-1][1])
        model(*part(Setup(), 0, 0, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        block: Any = model.blocks[1]
        block.unshard()
        seen.append([p.detach().clone() for p in block.parameters()])
        block.reshard()
        for updates, gates in held:
            gates.open_all()
            updates.remove()
    return seen


def test_gathering_waits_for_the_updates_of_every_optimizer_of_a_unit(on_two_ranks: Any):
    for plain, beside in (found["two_optimizers"] for found in on_two_ranks):
        for a, b in zip(plain, beside, strict=True):
            assert torch.equal(a, b)


class Ungathered:
    name = "a unit"

    def gathered_from(self) -> list[torch.Tensor]:
        return []


def test_a_thread_that_waited_for_an_update_does_not_end_the_next_one():
    parameter = nn.Parameter(torch.ones(2))
    update = ReadUpdate(parameter, 0, (), [])
    unit = _Unit(Ungathered())  # type: ignore[arg-type]
    first: Any = Future()
    next_one: Any = Future()
    unit.begin([update], {parameter: {}}, lambda _: first)
    waits, goes_on = threading.Event(), threading.Event()
    result = unit._result

    def slow(future: Any) -> None:
        result(future)
        if threading.current_thread() is late:
            waits.set()
            assert goes_on.wait(30)

    unit._result = slow  # type: ignore[method-assign]
    late = threading.Thread(target=unit.settle)
    late.start()
    first.set_result(None)
    assert waits.wait(30)
    unit.settle()
    unit.begin([update], {parameter: {}}, lambda _: next_one)
    goes_on.set()
    late.join()
    assert isinstance(parameter, Guard)
    next_one.set_result(None)
    unit.settle()
    assert type(parameter) is nn.Parameter


def saved_and_resumed(rank: int, size: int, folder: str) -> list[list[torch.Tensor]]:
    """Saved right after step(); gone on, and gone on from what was saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ends = []
    for resume in (False, True):
        model = sharded(size)
        optimizer = ours(model.parameters())
        ShardedUpdates(model, optimizer)
        if resume:
            weights, state = get_state_dict(model, optimizer)
            content = {"model": weights, "optimizer": state}
            dcp.load(content, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=content["model"],
                optim_state_dict=content["optimizer"],
            )
        for step in range(2 if resume else 0, 4):
            model(*part(Setup(), step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        ends.append([t.clone() for t in everything(model, optimizer)])
    return ends


def test_a_checkpoint_right_after_step_goes_on_to_the_bit(tmp_path: Any):
    for without, after in run(2, saved_and_resumed, str(tmp_path / "checkpoint")):
        for a, b in zip(without, after, strict=True):
            assert torch.equal(a, b)
