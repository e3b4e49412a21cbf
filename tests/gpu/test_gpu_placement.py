"""Where tensors are before, during and after training on a GPU. Copies only: no kernels needed."""

from __future__ import annotations

import pytest
import torch
from oracle import forced_plan
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW


class Product(nn.Module):
    """x @ W with a buffer; nothing but products, and no tensor operation that is not a copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(16, 16) / 4)  # of the root, which holds all others
        self.layers = nn.ModuleList(Product(16) for _ in range(4))
        shared = torch.arange(4.0)
        self.layers[0].register_buffer("first", shared)
        self.layers[1].register_buffer("second", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def adamw(model: nn.Module) -> CPUAdamW:
    return CPUAdamW(model.parameters(), lr=1e-2)


def wrapper(
    model: nn.Module,
    kind: str = "all",
    optimizer: CPUAdamW | None = None,
    **keywords: object,
) -> AutoHeteWrapper:
    keywords = {"gpu_mem": "1GiB", "cpu_mem": "64MiB", "profile_path": None, **keywords}
    plan = forced_plan(model, kind)
    return AutoHeteWrapper(model, optimizer or adamw(model), plan=plan, **keywords)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cuda") -> None:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(8, 16, generator=generator).to(device) for _ in range(2))
    model(x).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()


def plain_weights(steps: int) -> list[torch.Tensor]:
    model = Network()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, optimizer, "cpu")
    return [p.detach() for p in model.parameters()]


def assert_trained(model: nn.Module, steps: int) -> None:
    for p, q in zip(model.parameters(), plain_weights(steps), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["state", "all", "all+c"])
def test_a_model_on_the_cpu_or_on_the_gpu_is_taken_as_it_is(start, kind):
    model = Network().to(start)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    optimizer = adamw(model)
    wrapped = wrapper(model, kind, optimizer).cuda()
    assert all(p.is_cuda for p in model.parameters()), "user code sees tensors of the GPU"
    assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), before, strict=True))
    for _ in range(3):
        step(wrapped, optimizer)
    wrapped.unwrap()
    assert_trained(model, 3)


@pytest.mark.parametrize("kind", ["state", "all"])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_unwrap_leaves_plain_tensors_where_it_is_told_to(kind, target):
    model = Network()
    optimizer = adamw(model)
    wrapped = wrapper(model, kind, optimizer).cuda()
    step(wrapped, optimizer)
    x = torch.ones(2, 16, device="cuda")
    wrapped(x).backward(x)
    weights = [p.detach().cpu().clone() for p in model.parameters()]
    gradients = [p.grad.cpu().clone() for p in model.parameters()]
    wrapped.unwrap(target)
    for p, value, gradient in zip(model.parameters(), weights, gradients, strict=True):
        tensors = (p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
        assert {t.device.type for t in tensors} == {target}
        assert [type(p), type(p.grad)] == [nn.Parameter, torch.Tensor]
        assert torch.equal(p.detach().cpu(), value)
        assert torch.equal(p.grad.cpu(), gradient)
        assert p.untyped_storage().nbytes() == p.nbytes
    assert {b.device.type for b in model.buffers()} == {target}
    out = model(x.to(target))
    assert out.device.type == target
    if target == "cpu":
        optimizer.step()


def test_shared_buffers_move_together():
    model = Network()
    wrapped = wrapper(model).cuda()
    assert model.layers[0].first.is_cuda
    assert model.layers[0].first is model.layers[1].second
    wrapped.unwrap("cpu")
    assert not model.layers[0].first.is_cuda


def test_unwrap_onto_a_gpu_that_is_too_full_says_how_to_keep_the_model_on_the_cpu(monkeypatch):
    model = Network()
    optimizer = adamw(model)
    wrapped = wrapper(model, optimizer=optimizer).cuda()
    step(wrapped, optimizer)
    monkeypatch.setattr(type(wrapped.run.side), "free_for_plain_tensors", lambda self: 100)
    with pytest.raises(torch.OutOfMemoryError, match=r'free there; keep .*unwrap\("cpu"\)'):
        wrapped.unwrap()
    step(wrapped, optimizer)  # nothing has changed
    wrapped.unwrap("cpu")
    assert_trained(model, 2)


@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_memory_that_is_not_pinned_is_refused_and_the_model_is_as_it_was(start):
    model = Network().to(start)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="host memory was not pinned, expected pinned memory"):
        wrapper(model, pin=False).cuda()
    assert {p.device.type for p in model.parameters()} == {start}
    assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), before, strict=True))


def test_optimizers_that_run_their_own_step_are_refused_on_a_gpu():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = AutoHeteWrapper(model, optimizer, gpu_mem="1GiB", cpu_mem="64MiB")
    with pytest.raises(ValueError, match="optimizer is SGD, expected AdamW, Adam or"):
        wrapped.cuda()
    assert all(not p.is_cuda for p in model.parameters())


def test_the_limit_on_torchs_memory_is_put_back():
    before = torch.cuda.get_per_process_memory_fraction()
    wrapped = wrapper(Network()).cuda()
    assert torch.cuda.get_per_process_memory_fraction() < before
    wrapped.unwrap("cpu")
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_nothing_of_a_wrapper_stays_on_the_gpu():
    def round_trip() -> None:
        model = Network()
        optimizer = adamw(model)
        wrapped = wrapper(model, optimizer=optimizer).cuda()
        step(wrapped, optimizer)
        wrapped.unwrap("cpu")

    round_trip()  # what libraries keep is there now
    before = torch.cuda.memory_allocated()
    round_trip()
    assert torch.cuda.memory_allocated() == before
