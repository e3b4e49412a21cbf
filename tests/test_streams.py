"""The large streams of one update begin at different places of a large page, whoever made them."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import adamw, assert_bit_equal, forced_plan, train
from torch import Tensor, nn

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.optim import CPUSGD, CPULion

PAGE = 2 << 20
STEP = 3 * 4096 + 256  # csrc/base/stream_place.h
MILLION = 1 << 20  # of fp32: two large pages


def distance(a: int, b: int) -> int:
    """Bytes between two places of a large page, the shorter way round."""
    return min((a - b) % PAGE, (b - a) % PAGE)


def assert_apart(streams: dict[str, int], at_least: int = STEP) -> None:
    for (one, a), (other, b) in itertools.combinations(streams.items(), 2):
        assert distance(a, b) >= at_least, f"{one} and {other}: {a % PAGE} and {b % PAGE}"


def state_streams(state: dict[str, Any]) -> dict[str, int]:
    return {key: value.data_ptr() for key, value in state.items() if key != "step"}


# ---------------------------------------------------------------- the optimizers' own state

OPTIMIZERS = {
    "CPUAdamW": CPUAdamW,
    "amsgrad": partial(CPUAdamW, amsgrad=True),
    "bf16 moments": partial(CPUAdamW, moment_dtype=torch.bfloat16),
    "CPULion": CPULion,
    "CPUSGD": partial(CPUSGD, lr=0.1, momentum=0.9),
}


def trained(make: Any, dtype: torch.dtype, numel: int = MILLION) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(numel).to(dtype))
    parameter.grad = torch.randn(numel).to(dtype)
    optimizer = make([parameter])
    for _ in range(2):
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_begins_apart_from_what_it_is_read_beside(
    name: str, dtype: torch.dtype
) -> None:
    parameter, optimizer = trained(OPTIMIZERS[name], dtype)
    assert parameter.grad is not None
    state = state_streams(optimizer.state[parameter])
    for stream, place in state.items():  # where parameter and gradient begin is not ours to say
        for given in (parameter, parameter.grad):
            assert distance(place, given.data_ptr()) >= STEP, stream
    assert_apart(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_begins_apart_too(dtype: torch.dtype) -> None:
    parameter, optimizer = trained(CPUAdamW, dtype)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_apart({"param": parameter.data_ptr(), **state_streams(optimizer.state[parameter])})


def test_a_small_state_keeps_torchs_memory_and_a_large_one_takes_only_what_it_needs() -> None:
    for numel in (10, MILLION // 2 - 1, MILLION):
        parameter, optimizer = trained(CPUAdamW, torch.float32, numel)
        for key, value in optimizer.state[parameter].items():
            assert value.untyped_storage().nbytes() == value.nbytes, key


def saved_and_loaded(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def shared(tensor: Tensor) -> Tensor:
    return copy.deepcopy(tensor).share_memory_()


def resized(tensor: Tensor) -> Tensor:
    whole = tensor.clone()
    numel = tensor.numel()
    tensor.resize_(2 * numel)  # moves: torch's own allocator gives the new memory
    assert torch.equal(tensor[:numel], whole)
    return tensor.resize_(numel)


def in_an_array(tensor: Tensor) -> Tensor:
    return torch.from_numpy(tensor.numpy().copy())


@pytest.mark.parametrize("through", [saved_and_loaded, copy.deepcopy, shared, resized, in_an_array])
def test_large_state_is_an_ordinary_tensor(through: Any) -> None:
    parameter, optimizer = trained(CPUAdamW, torch.float32)
    moment = optimizer.state[parameter]["exp_avg"]
    values = moment.clone()
    assert torch.equal(through(moment), values)


def test_a_copied_optimizer_goes_on_with_the_bits_of_the_first() -> None:
    parameter, optimizer = trained(CPUAdamW, torch.bfloat16)
    parameters, second = copy.deepcopy(([parameter], optimizer))
    parameters[0].grad = parameter.grad.clone()
    for each in (optimizer, second):
        each.step()
    assert torch.equal(parameter, parameters[0])
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(value, second.state[parameters[0]][key]), key


# ---------------------------------------------------------------- many small tensors

SMALL = 9_999  # not a whole number of cache lines


def with_small_ones(number: int, make: Any = CPUAdamW) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(SMALL)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.randn(SMALL)
    optimizer = make(parameters)
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("loaded", [False, True])
def test_small_states_of_one_kind_lie_one_behind_the_other_and_kinds_begin_apart(
    loaded: bool,
) -> None:
    parameters, optimizer = with_small_ones(80)
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [state_streams(optimizer.state[p]) for p in parameters]
    piece = -(-4 * SMALL // 64) * 64
    for key in ("exp_avg", "exp_avg_sq"):
        first = states[0][key]
        assert [s[key] for s in states] == [first + piece * i for i in range(80)]
    for streams in states:
        assert_apart(streams)


def test_small_states_have_the_values_of_a_large_one() -> None:
    parameters, optimizer = with_small_ones(80)
    whole = nn.Parameter(torch.empty(80 * SMALL))
    torch.manual_seed(0)
    whole.data = torch.cat([torch.randn(SMALL) for _ in range(80)])
    whole.grad = torch.cat([p.grad for p in parameters])
    one = CPUAdamW([whole])
    one.step()
    for _ in range(3):
        optimizer.step()
        one.step()
    assert torch.equal(torch.cat(parameters), whole)
    for key in ("exp_avg", "exp_avg_sq"):
        values = torch.cat([optimizer.state[p][key] for p in parameters])
        assert torch.equal(values, one.state[whole][key])


def test_a_small_state_outlives_the_optimizer_that_gave_it_memory() -> None:
    parameters, optimizer = with_small_ones(80)
    kept = optimizer.state[parameters[40]]["exp_avg"]
    values = kept.clone()
    del optimizer, parameters
    with_small_ones(80)  # would write where it was
    assert torch.equal(kept, values)


def test_states_that_are_made_again_get_memory_again() -> None:
    parameters, optimizer = with_small_ones(80)
    for parameter in parameters[:50]:
        optimizer.state[parameter].clear()
    held = {id(p): optimizer.state[p]["exp_avg"].clone() for p in parameters[50:]}
    for parameter in parameters[50:]:
        parameter.grad = None
    optimizer.step()
    for parameter in parameters[:50]:
        assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(1.0))
    for parameter in parameters[50:]:
        assert torch.equal(optimizer.state[parameter]["exp_avg"], held[id(parameter)])


def test_a_group_added_later_gets_memory_of_its_own() -> None:
    parameters, optimizer = with_small_ones(80)
    more = [nn.Parameter(torch.randn(SMALL)) for _ in range(80)]
    for parameter in more:
        parameter.grad = torch.randn(SMALL)
    optimizer.add_param_group({"params": more})
    optimizer.step()
    places = sorted(optimizer.state[p]["exp_avg"].data_ptr() for p in parameters + more)
    assert all(b - a >= 4 * SMALL for a, b in itertools.pairwise(places))


# ---------------------------------------------------------------- the engine's blocks


class Wide(nn.Module):
    """Two layers of the weights given, beside small ones that put them at odd offsets."""

    def __init__(self, shapes: list[tuple[int, int]], frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(shapes, frozen) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Layer(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]], frozen: bool) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(7))
        self.apart = nn.Parameter(torch.randn(300, 301), requires_grad=not frozen)
        self.weights = nn.ParameterList(torch.randn(shape) * 0.01 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.odd.sum() + self.apart.sum()
        for weight in self.weights:
            x = x + (x[:, : weight.shape[1]] @ weight.t()).mean(1, keepdim=True) * scale
        return x


def wide(seed: int) -> nn.Module:
    """The first is all powers of two, where everything is aligned alike; the others are random."""
    torch.manual_seed(seed)
    if seed == 0:
        return Wide([(1024, 1024), (2048, 1024)], frozen=False)
    sizes = random.Random(seed)
    shapes = [(sizes.randint(1024, 1600), sizes.choice([1024, 1000, 1025])) for _ in range(2)]
    return Wide(shapes, frozen=bool(seed % 2))


def loop(model: nn.Module, optimizer: Any, step: int, dtype: torch.dtype = torch.float32) -> float:
    torch.manual_seed(step)
    loss = model(torch.randn(2, 1100).to(dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def large(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad and p.nbytes >= PAGE)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROOM = {"gpu_mem": "256MiB", "cpu_mem": "512MiB", "layers": "Layer"}


def await_updates_ahead(run: Any) -> None:
    """Until every unit is updated ahead of step()."""
    waiting = {u for u, unit in enumerate(run.units) if unit.parameters}
    while waiting:
        waiting -= {span[1] for span in run.engine.take_timeline() if span[2] == "update ahead"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_the_streams_of_a_units_update_and_their_spares_begin_apart(
    seed: int, precision: str
) -> None:
    model = wide(seed)
    spares = all(p.requires_grad for p in model.parameters())
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(
        model, optimizer, plan=forced_plan(model, "all"), precision=precision, profile_path=None,
        **ROOM,
    ).to("cpu")  # fmt: skip
    found: dict[nn.Parameter, set[tuple[str, int]]] = {p: set() for p in large(model)}
    wrapped.run.engine.record_timeline(True)
    for step in range(6):
        wrapped(torch.randn(2, 1100).to(DTYPES[precision])).mean().backward()
        if step >= 3 and spares:  # the loop is a habit: they change places with the others
            await_updates_ahead(wrapped.run)
        optimizer.step()
        wrapped.synchronize()
        for parameter, streams in found.items():
            streams.add(("param", parameter.data_ptr()))
            streams.update(state_streams(optimizer.state[parameter]).items())
            if step == 5:
                streams.add(("grad", parameter.grad.data_ptr()))
        optimizer.zero_grad()
    for streams in found.values():
        values = 4 if precision == "bf16" else 3
        assert len(streams) == (2 * values if spares else values) + 1
        assert_apart({f"{name} at {place}": place for name, place in streams})
        assert all(place % 256 == 0 for _, place in streams)
    wrapped.unwrap()


@pytest.mark.parametrize("kind", ["all", "state"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_with_large_streams_train_to_the_bits_of_plain_pytorch(
    kind: str, precision: str
) -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> float:
        return loop(model, optimizer, number, DTYPES[precision])

    def build() -> nn.Module:
        return wide(0).to(DTYPES[precision])

    wrap = {"plan": partial(forced_plan, kinds=kind), "precision": precision, **ROOM}
    ours = train(wrap=wrap, steps=5, loop=step, build=build)
    assert_bit_equal(ours, train(wrap=None, steps=5, loop=step, build=build))


def test_the_host_memory_that_the_error_names_is_enough_for_large_streams() -> None:
    def wrapped(cpu_mem: int) -> AutoHeteWrapper:
        model = wide(0)
        room = dict(ROOM, cpu_mem=cpu_mem)
        plan = forced_plan(model, "all")
        return AutoHeteWrapper(
            model, adamw(model), plan=plan, profile_path=None, early_updates=False, **room
        ).to("cpu")

    with pytest.raises(ValueError, match="cpu_mem") as refused:
        wrapped(1 << 20)
    needed = int(str(refused.value).split("(cpu_mem=")[1].split(")")[0])
    with pytest.raises(ValueError, match="cpu_mem"):
        wrapped(needed - 1)
    least = wrapped(needed)
    loop(least, least.run.bridge.optimizer, 0)
    least.unwrap()


def test_a_gradient_beside_one_that_was_kept_as_an_array_begins_apart() -> None:
    model = wide(0)
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(
        model, optimizer, plan=forced_plan(model, "all"), profile_path=None, **ROOM
    ).to("cpu")
    parameter = next(large(model))
    kept = []
    for _ in range(4):
        wrapped(torch.randn(2, 1100)).mean().backward()
        optimizer.step()
        wrapped.synchronize()
        kept.append(parameter.grad.numpy())
        streams = {"param": parameter.data_ptr(), "grad": parameter.grad.data_ptr()}
        assert_apart({**streams, **state_streams(optimizer.state[parameter])})
        optimizer.zero_grad()
    assert len({array.ctypes.data for array in kept}) == 4
    wrapped.unwrap()
