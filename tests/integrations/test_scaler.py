"""The Trainer's fp16 path (autocast and GradScaler), made to run on the host device.

accelerate refuses fp16 on a CPU, though torch has all of it there; so the scaler is put in after
the Trainer was built, where accelerate would have put its own.
"""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("transformers")
from accelerate.state import AcceleratorState
from trainers import assert_same_training, inner_optimizer, ours_of, train, trainer


@pytest.fixture
def fp16():
    def put(trainer, init_scale):
        accelerator = trainer.accelerator
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
        accelerator.state._mixed_precision = "fp16"  # until the reset below
        train(trainer)
        return trainer

    yield put
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_scaled_and_skipped_steps_are_those_of_the_plain_trainer(fp16, max_grad_norm):
    setting = {"max_steps": 8, "max_grad_norm": max_grad_norm, "logging_nan_inf_filter": False}
    ours = fp16(trainer(ours=True, **setting), 2.0**19)
    plain = fp16(trainer(ours=False, **setting), 2.0**19)
    assert_same_training(ours, plain)
    assert ours.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()
    callback = ours_of(ours)
    steps = max(int(s["step"]) for s in inner_optimizer(plain).state.values())
    assert 0 < callback.num_skipped_steps == 8 - steps
    assert callback.report().num_steps == steps


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_goes_through_the_engine_and_not_through_the_step_accelerate_captured(fp16, fused):
    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)

    ours = fp16(trainer(ours=True, optimizer=optimizer), 4.0)
    assert ours_of(ours).report().num_steps == 4
    assert ours_of(ours).num_skipped_steps == 0
    step = getattr(inner_optimizer(ours).step, "__func__", None)
    assert getattr(step, "_autohete_step", False)
    ours_of(ours).unwrap()
    train(ours)
    step = inner_optimizer(ours).step  # a scheduler may have put its own function there
    assert not hasattr(getattr(step, "__func__", step), "_autohete_step")


def test_steps_that_are_all_skipped_are_counted_and_told_once(fp16, caplog):
    with caplog.at_level(logging.WARNING, logger="autohete"):
        ours = trainer(ours=True, max_steps=20, logging_nan_inf_filter=False)
        before = [p.detach().clone() for p in ours.model.parameters()]
        fp16(ours, float("inf"))
    assert ours_of(ours).num_skipped_steps == 20
    assert ours.state.log_history[-1]["autohete/skipped_steps"] == 20
    assert len([r for r in caplog.records if "was skipped" in r.message]) == 1
    assert ours.accelerator.optimizer_step_was_skipped == (
        not inner_optimizer(ours)._step_supports_amp_scaling
    )
    for p, q in zip(ours.model.parameters(), before, strict=True):
        assert torch.equal(p, q)
