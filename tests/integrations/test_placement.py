"""While a callback holds a model, moving the model moves its buffers only."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from trainers import callback, llama, train, trained, trainer

from autohete import AutoHeteWrapper
from autohete.integrations.transformers import AutoHeteCallback


@pytest.fixture
def moves(monkeypatch):
    """Counts what is asked to move, since on the host device a move changes nothing visible."""
    counted = {"parameters": 0, "others": 0}
    original = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        counted["parameters" if isinstance(tensor, nn.Parameter) else "others"] += 1
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return counted


def test_the_trainer_and_accelerate_move_no_parameter(moves):
    trained(ours=False, build=llama)
    assert moves["parameters"] >= 20, "they would: so the counter counts"
    moves["parameters"] = 0
    trained(ours=True, build=llama)
    assert moves["parameters"] == 0


def test_to_moves_buffers_and_leaves_parameters():
    model = llama()
    assert any(True for _ in model.buffers())
    held = callback(model)
    assert model.to("meta") is model
    assert {b.device.type for b in model.buffers()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    held.unwrap()
    model.to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_container_that_is_moved_leaves_the_held_model_too():
    model = llama()
    callback(model)
    nn.Sequential(model).to("meta")
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
    ],
)
def test_a_conversion_is_refused(change):
    model = llama()
    callback(model)
    with pytest.raises(ValueError, match="convert it before"):
        change(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_float_of_a_half_model_is_refused():
    model = llama().bfloat16()
    callback(model)
    with pytest.raises(ValueError, match="bfloat16"):
        model.float()


def test_sharing_between_processes_is_refused():
    model = llama()
    callback(model)
    with pytest.raises(ValueError, match="share_memory"):
        model.share_memory()


def test_a_model_in_training_does_not_go_to_another_device():
    ours = trained(ours=True, build=llama)
    ours.model.to("cpu")
    with pytest.raises(ValueError, match=r"unwrap\(\) on the AutoHeteCallback"):
        ours.model.to("meta")
    assert {b.device.type for b in ours.model.buffers()} == {"cpu"}


def test_copies_and_pickles_of_a_held_model_can_be_moved():
    model = llama()
    callback(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        twin.to("meta")
        assert {p.device.type for p in twin.parameters()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"optim": "adalomo"}, "lomo"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_when_the_trainer_is_built(arguments, what):
    with pytest.raises(ValueError, match=what):
        trainer(ours=True, optimizer=None, **arguments)


def test_several_gpus_in_one_process_are_refused_when_the_trainer_is_built(monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        trainer(ours=True)


def test_another_model_than_the_trainers_is_refused():
    with pytest.raises(ValueError, match="the same object"):
        trainer(ours=False, before=[callback(llama())])


def test_bad_keywords_are_refused_at_once():
    model = llama()
    for options, what in (
        ({"gpu_memory": 1}, "gpu_memory"),
        ({"gpu_mem": "many"}, "gpu_mem"),
        ({"max_grad_norm": 1.0}, "TrainingArguments"),
        ({"gradient_accumulation_steps": 2}, "TrainingArguments"),
    ):
        with pytest.raises(ValueError, match=what):
            AutoHeteCallback(model, **options)
    with pytest.raises(ValueError, match="gpu_mem is None"):
        trainer(ours={"gpu_mem": None})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="the plain model"):
        AutoHeteCallback(AutoHeteWrapper(model, optimizer, gpu_mem="1MiB"), gpu_mem="1MiB")


def test_a_budget_that_cannot_hold_the_model_is_refused_before_the_first_step():
    ours = trainer(ours={"gpu_mem": "8KiB"})
    with pytest.raises(ValueError, match="expected at least"):
        train(ours)
    assert ours.state.global_step == 0
