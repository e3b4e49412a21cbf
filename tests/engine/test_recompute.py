"""A recomputed layer starts from what its first run started from, and leaves no second mark."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from models import Block, TinyGPT, batch
from oracle import assert_bit_equal, forced_plan, plain_loop, train
from torch import Tensor, nn

EVERYTHING_RECOMPUTED = {"plan": partial(forced_plan, kinds="all+c")}


class Drawing(Block):
    """Noise from a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__(32, 4, 0.1)
        self.kind = kind
        makers: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.Generator().manual_seed(3),
            "python": lambda: random.Random(3),
            "numpy": lambda: np.random.default_rng(3),
            "numpy, old": lambda: np.random.RandomState(3),
        }
        self.own = makers[kind]()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return super().forward(x * torch.rand(x.shape, generator=self.own))
        return super().forward(x * self.own.random() + getattr(self.own, "rand", float)())


class Counting(Block):
    """A counter, a flag, a list and a table that the mathematics depends on."""

    def __init__(self) -> None:
        super().__init__(32, 4, 0.1)
        self.count, self.odd, self.scale = 0, False, torch.ones(())
        self.seen: list[float] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.table: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.odd = not self.odd
        self.scale = self.scale * 1.01
        self.seen.append(x.mean().item())
        self.recent.append(self.count)
        self.table[f"entry {self.count % 3}"] = sum(self.recent)
        factor = self.count / 10 + self.odd + sum(self.seen) + sum(self.table.values())
        return super().forward(x * factor * self.scale)


def gpt_of(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = TinyGPT(layers=1)
    model.blocks = nn.ModuleList([block() for _ in range(3)])
    return model


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "numpy, old"])
def test_generators_that_layers_own_draw_the_same_again(kind):
    run = partial(train, steps=4, build=partial(gpt_of, partial(Drawing, kind)))
    assert_bit_equal(run(wrap=EVERYTHING_RECOMPUTED), run(wrap=None))


def test_attributes_that_layers_write_are_as_before_and_marked_once():
    run = partial(train, steps=4, build=partial(gpt_of, Counting))
    ours, plain = run(wrap=EVERYTHING_RECOMPUTED), run(wrap=None)
    assert_bit_equal(ours, plain)
    for block, expected in zip(ours.model.blocks, plain.model.blocks, strict=True):
        for name in ("count", "odd", "seen", "recent", "table", "scale"):
            assert getattr(block, name) == getattr(expected, name), name


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_mode_set_between_forward_and_backward_does_not_reach_the_recomputation(checkpointing):
    """Dropout was on in the forward, so it is in backward."""

    def loop(model, optimizer, step):
        loss = model(*batch(step))
        model.eval()
        loss.backward()
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    keywords = EVERYTHING_RECOMPUTED if checkpointing else {"gpu_mem": "500KiB"}
    assert_bit_equal(train(wrap=keywords, loop=loop), train(wrap=None, loop=loop))


ELSEWHERE = {"generator": torch.Generator(), "count": 0}


class DrawsElsewhere(Block):
    def __init__(self) -> None:
        super().__init__(32, 4, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=ELSEWHERE["generator"])
        return super().forward(x + noise)


class CountsElsewhere(Block):
    def __init__(self) -> None:
        super().__init__(32, 4, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        ELSEWHERE["count"] += 1
        return super().forward(x) * ELSEWHERE["count"]


@pytest.mark.parametrize("block", [DrawsElsewhere, CountsElsewhere])
@pytest.mark.parametrize("keywords", [EVERYTHING_RECOMPUTED, {}], ids=["forced", "planned"])
def test_what_is_kept_out_of_reach_is_refused_in_the_first_backward(block, keywords):
    with pytest.raises(RuntimeError, match="unit blocks.2: its forward gave another output"):
        train(wrap=keywords, steps=1, build=partial(gpt_of, block))


def test_the_remedy_the_refusal_names_gives_the_bits_of_plain_training():
    def run(wrap: Any) -> Any:
        ELSEWHERE["generator"].manual_seed(0)
        return train(wrap=wrap, steps=3, build=partial(gpt_of, DrawsElsewhere))

    assert_bit_equal(run({"plan": partial(forced_plan, kinds="all")}), run(None))


class NotANumber(Block):
    def __init__(self) -> None:
        super().__init__(32, 4, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


def test_outputs_that_are_no_numbers_are_the_same_twice():
    result = train(wrap=EVERYTHING_RECOMPUTED, steps=2, build=partial(gpt_of, NotANumber))
    assert str(result.losses) == "[nan, nan]"


def test_the_comparison_is_over_after_two_recomputations():
    """It keeps torch from ending a recomputation early."""
    calls: list[int] = []

    def loop(model, optimizer, step):
        unit = next(u for u in model.run.units if u.is_layer)
        loss = plain_loop(model, optimizer, step)
        calls.append(unit.num_compared)
        return loss

    train(wrap=EVERYTHING_RECOMPUTED, steps=4, loop=loop)
    assert calls == [1, 2, 2, 2]
