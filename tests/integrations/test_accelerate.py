"""An Accelerate loop with a wrapped model does what it does with the plain one, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from oracle import forced_plan
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from trainers import Tokens, adamw, gpt2

from autohete import AutoHeteWrapper


@dataclass
class Loop:
    accelerator: Accelerator
    plain: nn.Module
    model: Any
    optimizer: Any
    inner: Any
    losses: list[float]
    norms: list[float]


def loop(
    ours: bool,
    *,
    mixed_precision: str = "no",
    optimizer_first: bool = False,
    place: bool = True,
    scaler: Any = None,
    resume: Any = None,
    batches: int = 6,
) -> Loop:
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
    )
    accelerator.scaler = scaler
    plain = gpt2()
    plain.config.use_cache = False  # transformers 4.57 would grow a cache while training
    inner = adamw(plain)
    model: Any = plain
    if ours:
        plan = forced_plan(plain, "all+c")
        model = AutoHeteWrapper(plain, inner, gpu_mem="16MiB", plan=plan, profile_path=None)
        if place:
            model.to(accelerator.device)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    data: Any = DataLoader(Tokens(), batch_size=2)
    optimizer: Any
    if optimizer_first:
        optimizer, model, data, scheduler = accelerator.prepare(inner, model, data, scheduler)
    else:
        model, optimizer, data, scheduler = accelerator.prepare(model, inner, data, scheduler)
    if resume is not None:
        accelerator.load_state(str(resume))
    set_seed(1)
    result = Loop(accelerator, plain, model, optimizer, inner, [], [])
    for _, batch in zip(range(batches), data, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                result.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        result.losses.append(loss.item())
    return result


plain_loop = cache(lambda mixed_precision="no": loop(False, mixed_precision=mixed_precision))


def assert_same(ours: Loop, plain: Loop) -> None:
    assert ours.losses == plain.losses
    assert ours.norms == plain.norms
    for p, q in zip(ours.plain.parameters(), plain.plain.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in plain.inner.state[q].items():
            assert torch.equal(ours.inner.state[p][key], value), key


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("place", [True, False])
def test_accumulation_clipping_and_a_scheduler(mixed_precision, optimizer_first, place):
    setting = {"mixed_precision": mixed_precision, "optimizer_first": optimizer_first}
    ours = loop(True, place=place, **setting)
    assert_same(ours, plain_loop(mixed_precision))
    assert ours.model.report().num_steps == 3
    assert not ours.optimizer.step_was_skipped


def test_a_scaler_steps_through_the_engine_when_the_model_was_placed_first():
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    ours = loop(True, scaler=scaler())
    assert_same(ours, loop(False, scaler=scaler()))
    assert ours.model.report().num_steps == 3


@pytest.mark.parametrize("saver", [True, False])
def test_a_saved_state_is_taken_up_by_autohete_and_by_the_plain_loop(tmp_path, saver):
    loop(saver).accelerator.save_state(str(tmp_path))
    assert_same(loop(True, resume=tmp_path), loop(False, resume=tmp_path))


def test_models_and_states_are_saved_whole(tmp_path):
    ours = loop(True)
    ours.accelerator.save_model(ours.model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    expected = plain_loop().plain.state_dict()
    assert saved.keys() == expected.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert ours.accelerator.get_state_dict(ours.model).keys() == expected.keys()
    assert ours.accelerator.unwrap_model(ours.model).unwrap() is ours.plain
