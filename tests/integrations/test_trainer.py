"""The Hugging Face Trainer with AutoHeteCallback does what the plain Trainer does, to the bit."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file
from trainers import (
    assert_same_training,
    gpt2,
    inner_optimizer,
    llama,
    logged,
    ours_of,
    train,
    trained,
    trainer,
)
from transformers import TrainerCallback

from autohete import CPUAdamW

SETTINGS = {
    "default": {},
    "accumulation 3": {"gradient_accumulation_steps": 3},
    "max_grad_norm 0": {"max_grad_norm": 0.0},
    "max_grad_norm 0.1": {"max_grad_norm": 0.1},
    "label smoothing and accumulation": {
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 3,
    },
    "bf16 autocast": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "loader workers": {"dataloader_num_workers": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_losses_norms_weights_and_moments_as_the_plain_trainer(setting):
    plain = trained(ours=False, **SETTINGS[setting])
    assert_same_training(trained(ours=True, **SETTINGS[setting]), plain)


@cache
def plain_run():
    return trained(ours=False)  # compared with, never changed


def test_the_planned_run_is_the_same_too_and_stays_within_the_budget():
    ours = trained(ours={"gpu_mem": "512KiB"}, max_steps=10)
    assert_same_training(ours, trained(ours=False, max_steps=10))
    callback = ours_of(ours)
    assert callback.plan is not None
    assert callback.report().num_steps == 10
    assert 0 < callback.report().device_peak_measured_bytes <= 512 * 1024


def test_llama_with_bf16_and_accumulation_is_the_same():
    setting = {"bf16": True, "gradient_accumulation_steps": 2, "build": llama}
    assert_same_training(trained(ours=True, **setting), trained(ours=False, **setting))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_optimizer_the_trainer_makes_stays_within_torchs_own_spread(optim):
    """No further from torch than twice torch's fused is from torch's unfused on the same run."""
    setting = {"optimizer": None, "weight_decay": 0.1, "max_steps": 10}
    torchs = {
        o: trained(ours=False, optim=o, **setting) for o in ("adamw_torch", "adamw_torch_fused")
    }
    ours = trained(ours=True, optim=optim, **setting)

    def distance(a, b, what):
        optimizers = inner_optimizer(a), inner_optimizer(b)
        return max(
            (torch.sub(*(what(o, p) for o, p in zip(optimizers, pair, strict=True))))
            .detach()
            .abs()
            .max()
            .item()
            for pair in zip(a.model.parameters(), b.model.parameters(), strict=True)
        )

    for what in (
        lambda o, p: p,
        lambda o, p: o.state[p]["exp_avg"],
        lambda o, p: o.state[p]["exp_avg_sq"],
    ):
        spread = distance(*torchs.values(), what)
        assert distance(ours, torchs[optim], what) <= 2 * spread
    groups = [{k: v for k, v in g.items() if k != "params"} for g in ours.optimizer.param_groups]
    assert groups == [
        {k: v for k, v in g.items() if k != "params"} for g in torchs[optim].optimizer.param_groups
    ]


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_optimizers_of_other_kinds_run_their_own_step(optim):
    setting = {
        "optimizer": None,
        "optim": optim,
        "optim_args": "momentum=0.9" if optim == "sgd" else None,
    }
    assert_same_training(trained(ours=True, **setting), trained(ours=False, **setting))


def test_lora_with_a_frozen_base_is_the_same():
    peft = pytest.importorskip("peft")

    def build():
        model = gpt2()
        config = peft.LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1
        )
        return peft.get_peft_model(model, config)

    def optimizer(model):
        return CPUAdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    setting = {"build": build, "optimizer": optimizer}
    assert_same_training(trained(ours=True, **setting), trained(ours=False, **setting))


# ------------------------------------------------------------------------- saving and resuming

SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("saver", ["ours", "plain"])
@pytest.mark.parametrize("resumer", ["ours", "plain"])
def test_a_run_resumed_from_a_checkpoint_is_the_run_that_went_on(tmp_path, saver, resumer):
    straight = plain_run()
    trained(ours=saver == "ours", folder=tmp_path, **SAVING)
    resumed = trainer(ours=resumer == "ours", folder=tmp_path, **SAVING)
    train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed)[2:-1] == logged(straight)[2:-1]
    resumed.state.log_history = straight.state.log_history
    assert_same_training(resumed, straight)


def test_half_parameters_resume_from_their_masters(tmp_path):
    setting = {"ours": {"precision": "bf16"}, "folder": tmp_path, **SAVING}
    straight = trained(**setting)
    resumed = trainer(**setting)
    train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {p.dtype for p in resumed.model.parameters()} == {torch.bfloat16}
    assert any("master" in s for s in inner_optimizer(resumed).state.values())
    assert logged(resumed)[2:-1] == logged(straight)[2:-1]
    resumed.state.log_history = straight.state.log_history
    assert_same_training(resumed, straight)


def test_checkpoints_hold_the_same_safetensors_and_optimizer_state(tmp_path):
    for name, ours in (("ours", True), ("plain", False)):
        trained(ours=ours, folder=tmp_path / name, **SAVING)
    a, b = (tmp_path / name / "checkpoint-2" for name in ("ours", "plain"))
    assert sorted(f.name for f in a.iterdir()) == sorted(f.name for f in b.iterdir())
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    states = [torch.load(f / "optimizer.pt", weights_only=True) for f in (a, b)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, state in states[1]["state"].items():
        assert all(torch.equal(states[0]["state"][index][k], v) for k, v in state.items())
    sizes = [(f / "optimizer.pt").stat().st_size for f in (a, b)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_load_best_model_at_end_with_save_only_model(tmp_path):
    setting = {
        **SAVING,
        "save_only_model": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.05,  # so that the loss rises, and the best model is not the last
    }
    ours = trained(ours=True, folder=tmp_path / "ours", **setting)
    plain = trained(ours=False, folder=tmp_path / "plain", **setting)
    assert_same_training(ours, plain)
    best = Path(ours.state.best_model_checkpoint)
    assert best.name == Path(plain.state.best_model_checkpoint).name == "checkpoint-2"
    assert not (best / "optimizer.pt").exists()
    weights = load_file(best / "model.safetensors")
    assert all(torch.equal(ours.model.state_dict()[k], v) for k, v in weights.items())
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


# ------------------------------------------------------------------------- callbacks and logs


class Reader(TrainerCallback):
    """Keeps the weights and gradients' absence as on_step_end shows them."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append([p.detach().clone() for p in model.parameters()])


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_callback_before_or_after_ours_reads_finished_weights(place):
    readers = Reader(), Reader()
    plain = trained(ours=False, **{place: [readers[0]]})
    assert_same_training(trained(ours=True, **{place: [readers[1]]}), plain)
    for a, b in zip(readers[0].seen, readers[1].seen, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_same_callback_added_twice_changes_nothing():
    twice = trainer(ours=True)
    twice.add_callback(ours_of(twice))
    train(twice)
    assert_same_training(twice, plain_run())
    assert ours_of(twice).report().num_steps == 4


def test_callback_added_after_the_trainer_was_built():
    from trainers import callback

    late = trainer(ours=False)
    late.add_callback(callback(late.model))
    train(late)
    assert_same_training(late, plain_run())
    assert ours_of(late).report().d2h_bytes > 0


class Listener(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_our_figures_are_in_the_log_history_and_in_later_callbacks_logs(tmp_path):
    listener = Listener()
    ours = trained(ours=True, after=[listener], folder=tmp_path, **SAVING)
    for entries in (ours.state.log_history, listener.logs):
        for entry in entries:
            assert {"autohete/d2h_bytes", "autohete/device_peak_measured_bytes"} <= entry.keys()
        assert entries[-1]["autohete/h2d_bytes"] > entries[0]["autohete/h2d_bytes"] > 0
    json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())


# ------------------------------------------------------------------------- before and after


def test_evaluation_before_training_runs_within_the_budget_and_changes_nothing():
    ours, plain = trainer(ours=True), trainer(ours=False)
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert ours_of(ours).report().h2d_bytes > 0, "streamed, not resident"
    for made in (ours, plain):
        train(made)
    assert_same_training(ours, plain)


def test_training_again_and_predicting_after_training():
    ours, plain = trained(ours=True), trained(ours=False)
    for made in (ours, plain):
        train(made)
    assert_same_training(ours, plain)
    a, b = (made.predict(made.eval_dataset) for made in (ours, plain))
    assert (a.predictions == b.predictions).all()
    assert a.metrics["test_loss"] == b.metrics["test_loss"]


def test_unwrap_leaves_a_plain_model_that_trains_on_as_the_plain_one():
    ours, plain = trained(ours=True), trained(ours=False)
    assert ours_of(ours).unwrap() is ours.model
    for module in ours.model.modules():
        assert not {"forward", "_apply"} & vars(module).keys()
    # A scheduler of transformers 4.57 leaves a step() of its own there, of plain ones too.
    assert ("step" in vars(inner_optimizer(ours))) == ("step" in vars(inner_optimizer(plain)))
    for made in (ours, plain):
        train(made)
    assert_same_training(ours, plain)


def test_a_new_callback_takes_a_trained_model_over():
    first, plain = trained(ours=True), trained(ours=False)
    model, optimizer = first.model, inner_optimizer(first)
    second = trainer(ours=True, build=lambda: model, optimizer=lambda _: optimizer)
    train(second)
    third = trainer(
        ours=False, build=lambda: plain.model, optimizer=lambda _: inner_optimizer(plain)
    )
    train(third)
    assert_same_training(second, third)
    with pytest.raises(RuntimeError, match="nothing is attached"):
        ours_of(first).report()


def test_deepcopy_of_a_held_and_of_a_training_model_is_plain():
    ours = trainer(ours=True)
    copies = [copy.deepcopy(ours.model)]
    train(ours)
    copies.append(copy.deepcopy(ours.model))
    for twin in copies:
        twin.half()  # a held model refuses
        assert all(p.dtype == torch.float16 for p in twin.parameters())
    assert next(ours.model.parameters()).dtype == torch.float32
