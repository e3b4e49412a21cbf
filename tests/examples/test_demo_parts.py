"""The parts of the demonstration: the text, the model, the figure `gpu_mem` is held against."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from autohete.demo.gpt import GPT, GPTConfig, generate
from autohete.demo.need import device_need
from autohete.demo.text import batches, standard_library_text

SMALL = GPTConfig(num_layers=2, width=32, num_heads=2, context=16)


@pytest.fixture(scope="module")
def text():
    return standard_library_text(max_bytes=400_000)


def test_the_text_is_real_and_no_file_is_on_both_sides(text) -> None:
    training, held_out = (bytes(part.tolist()) for part in (text.training, text.held_out))
    assert b"\ndef " in training
    assert b"\ndef " in held_out
    chunks = [held_out[i : i + 200] for i in range(0, len(held_out) - 200, 5000)]
    assert [chunk for chunk in chunks if chunk in training] == []


def test_targets_are_the_next_bytes_and_the_seed_decides_which(text) -> None:
    tokens, targets = next(batches(text.training, batch=3, context=16, seed=4))
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    again, _ = next(batches(text.training, batch=3, context=16, seed=4))
    other, _ = next(batches(text.training, batch=3, context=16, seed=5))
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)


def test_an_untrained_model_knows_nothing(text) -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    loss = model(*next(batches(text.training, batch=4, context=16, seed=0)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_no_position_sees_a_later_byte() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 99
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])


def test_a_tied_head_is_the_embedding() -> None:
    config = GPTConfig(num_layers=1, width=32, num_heads=2, context=16, tie_head=True)
    model = GPT(config)
    assert model.head.weight is model.token.weight
    untied = GPT(GPTConfig(num_layers=1, width=32, num_heads=2, context=16))
    assert len(list(untied.parameters())) == len(list(model.parameters())) + 1


def test_generating_continues_the_prompt_past_the_context() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    written = generate(GPT(SMALL).eval(), b"def ", 20, SMALL.context, generator)
    assert written.startswith(b"def ")
    assert len(written) == 24


def test_a_width_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 33, expected a multiple of the 2 heads"):
        GPTConfig(width=33, num_heads=2)


def test_the_need_counts_what_autograd_saves() -> None:
    """A linear layer and a GELU save their inputs: the batch, and what lies between them."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 16)

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.linear(x)).sum()

    model = Two()
    need = device_need(model, torch.randn(4, 8), torch.empty(0))
    parameters = (8 * 16 + 16) * 4
    assert (need.parameters, need.gradients) == (parameters, parameters)
    assert need.optimizer_state == 2 * parameters
    assert need.saved_activations == (4 * 8 + 4 * 16) * 4
    assert need.total == 4 * parameters + need.saved_activations


def test_counting_leaves_model_and_random_state_as_they_were(text) -> None:
    torch.manual_seed(3)
    model = GPT(SMALL)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    device_need(model, *next(batches(text.training, batch=2, context=16, seed=0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
