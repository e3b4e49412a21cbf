"""Models sharded by fully_shard: autohete's CPU optimizers on the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Setup, full, part
from models import make_gpt
from ranks import run
from torch import nn

from autohete import CPUSGD, AutoHeteWrapper, CPUAdamW, CPULion

STEPS = 5
EPS = 1e-4  # gradients of attention's key biases are 0 but for rounding, which Adam would magnify


def sharded(size: int, *, width: int = 32, bf16: bool = False) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = make_gpt(layers=2, width=width, dropout=0.0)
    if bf16:
        model = model.bfloat16()
    mesh = init_device_mesh("cpu", (size,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def trained(rank: int, size: int, make: Any, clip: float | None, **options: Any) -> dict[str, Any]:
    """Losses, norms, weights and moments of a sharded model under an optimizer."""
    model = sharded(size, **options)
    optimizer = make(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(*part(Setup(), step, 0, rank))
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states = [optimizer.state[p] for p in model.parameters()]
    return {
        "losses": losses,
        "norms": norms,
        "weights": [full(p) for p in model.parameters()],
        "states": [{k: full(v) for k, v in sorted(state.items())} for state in states],
        "local": [v.to_local().numel() for s in states for k, v in s.items() if k != "step"],
    }


def ours(parameters: Any) -> Any:
    return CPUAdamW(parameters, lr=1e-2, weight_decay=0.1, eps=EPS)


def torchs(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=EPS)


def both(rank: int, size: int, clip: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(rank, size, ours, clip), trained(rank, size, torchs, clip)


@pytest.mark.parametrize(
    ("size", "clip"), [(2, 0.5), *(pytest.param(n, None, marks=pytest.mark.slow) for n in (3, 4))]
)
def test_adamw_on_shards_is_torchs_within_rounding(size: int, clip: float | None):
    ranks = run(size, both, clip)
    for mine, theirs in ranks:
        torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(mine["norms"], theirs["norms"], rtol=1e-5, atol=0)
        for a, b in zip(mine["weights"], theirs["weights"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert [s.keys() for s in mine["states"]] == [s.keys() for s in theirs["states"]]
        for a, b in zip(mine["states"], theirs["states"], strict=True):
            assert a["step"] == b["step"] == STEPS
            torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-3, atol=1e-6)
        # Each rank has its rows of the state, and all together the whole once.
    whole = sum(2 * w.numel() for w in ranks[0][0]["weights"])
    assert sum(sum(mine["local"]) for mine, _ in ranks) == whole


def sgd(parameters: Any, **numbers: Any) -> CPUSGD:
    return CPUSGD(parameters, momentum=0.9, **numbers)


def one_step(rank: int, size: int, rule: Any) -> list[tuple[list[torch.Tensor], Any]]:
    """The same gradients to a sharded model and to a plain one."""
    model, plain = sharded(size), make_gpt(layers=2, dropout=0.0)
    out = []
    for parameters in (list(model.parameters()), list(plain.parameters())):
        optimizer = rule(parameters, lr=1e-2, weight_decay=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in parameters:
                gradient = torch.randn(p.shape, generator=generator)
                p.grad = gradient if type(p) is nn.Parameter else as_shard(gradient, p)
            optimizer.step()
        states = [full(v) for p in parameters for _, v in sorted(optimizer.state[p].items())]
        out.append([full(p) for p in parameters] + states)
    return out


def as_shard(whole: torch.Tensor, like: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements)


@pytest.mark.parametrize("rule", [CPUAdamW, CPULion, sgd, CPUSGD])
def test_a_rule_on_shards_is_the_rule_on_the_whole_to_the_bit(rule: Any):
    for on_shards, on_whole in run(2, one_step, rule):
        for a, b in zip(on_shards, on_whole, strict=True):
            assert torch.equal(a, b)


def halves(rank: int, size: int) -> dict[str, Any]:
    return trained(rank, size, ours, None, bf16=True)


def test_half_shards_get_fp32_masters_of_what_a_rank_has():
    for result in run(2, halves):
        for weight, state in zip(result["weights"], result["states"], strict=True):
            assert weight.dtype == torch.bfloat16 and state["master"].dtype == torch.float32
            assert torch.equal(weight, state["master"].bfloat16())
            assert state["exp_avg"].dtype == torch.float32


def saved(rank: int, size: int, folder: str, steps: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded(size)
    optimizer = ours(model.parameters())
    go_on(model, optimizer, rank, 0, steps)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resumed(rank: int, size: int, folder: str, first: int, last: int) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(size)
    optimizer = ours(model.parameters())
    if first:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    go_on(model, optimizer, rank, first, last)
    return [full(p) for p in model.parameters()]


def go_on(model: nn.Module, optimizer: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        model(*part(Setup(), step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_shards_are_saved_and_go_on_to_the_bit(tmp_path: Any):
    folder = str(tmp_path / "checkpoint")
    run(2, saved, folder, 2)
    without, after = run(2, resumed, folder, 0, 4), run(2, resumed, folder, 2, 4)
    for a, b in zip(without[0], after[0], strict=True):
        assert torch.equal(a, b)


def refused(rank: int, size: int) -> list[str]:
    model = sharded(size)
    optimizer = ours(model.parameters())
    with pytest.raises(ValueError, match="is a DTensor") as wrapping:
        AutoHeteWrapper(model, optimizer, gpu_mem="64MiB").to("cpu")
    parameter: Any = next(model.parameters())
    parameter.grad = as_shard(torch.zeros(parameter.shape), parameter).redistribute(
        placements=[replicate()]
    )
    with pytest.raises(ValueError, match="expected the same") as placing:
        optimizer.step()
    return [str(wrapping.value), str(placing.value)]


def replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def test_what_is_not_supported_is_refused_and_says_what_to_do():
    for wrapping, placing in run(2, refused):
        assert "CPUOffloadPolicy() and autohete.CPUAdamW" in wrapping
        assert "redistribute the gradient" in placing
