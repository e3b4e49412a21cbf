"""Tied weights: the second gradient is added to the first in place, to the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autohete.tied import let_add_in_place, shared_parameters
from autohete.units import find_units


def sums_in(profile: Any, shape: list[int]) -> list[str]:
    """How tensors of a shape were added: "aten::add" made a third one, "aten::add_" did not.

    (Under a dispatch mode autograd never adds in place, so the profiler has to look.)
    """
    return [
        event.name
        for event in profile.events()
        if event.name in ("aten::add", "aten::add_") and event.input_shapes[:1] == [shape]
    ]


class Tied(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 64, bias=bias)
        self.head.weight = self.token.weight


def gradient(model: Tied, watch: bool, create_graph: bool = False) -> tuple[Tensor, list[str]]:
    tokens = torch.arange(24).reshape(2, 12)
    x = model.token(tokens)
    for layer in model.layers:
        x = layer(x)
    out = model.head(x)
    if watch:
        let_add_in_place(out, frozenset({id(model.token.weight)}))
    loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        (grad,) = torch.autograd.grad(loss, [model.token.weight], create_graph=create_graph)
    return grad, sums_in(profile, list(model.token.weight.shape))


def test_the_sum_is_made_in_place_and_no_bit_changes() -> None:
    for bias in (False, True):
        plain, before = gradient(Tied(bias), watch=False)
        ours, after = gradient(Tied(bias), watch=True)
        assert torch.equal(plain, ours) and plain.stride() == ours.stride()
        assert "aten::add" in before, (
            "torch makes a third tensor: without that this file is not needed"
        )
        assert after == ["aten::add_"]


def test_a_graph_of_the_gradient_is_left_whole() -> None:
    plain, _ = gradient(Tied(False), watch=False, create_graph=True)
    ours, _ = gradient(Tied(False), watch=True, create_graph=True)
    assert ours.requires_grad and torch.equal(plain, ours)


def test_only_what_several_modules_use_is_shared() -> None:
    model = Tied(True)
    units = {unit.name: unit for unit in find_units(model)}
    assert shared_parameters(units["token"]) == {id(model.token.weight)}
    assert all(not shared_parameters(u) for name, u in units.items() if name != "token")
