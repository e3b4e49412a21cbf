"""The models of configurations: which are planned, what of them, and how often they are built."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from autohete.planning import built_model, describe_model, plan_for
from autohete.planning.built_model import build_model
from autohete.planning.sweep import sweep_batch

B, S = 2, 16
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}


def gpt2() -> GPT2Config:
    return GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64)


def mixtral(**more: Any) -> Any:
    return transformers.MixtralConfig(**_SMALL, **_HEADS, num_local_experts=4, **more)


def gpt_oss(**more: Any) -> Any:
    return transformers.GptOssConfig(**_SMALL, **_HEADS, num_local_experts=4, head_dim=8, **more)


def t5() -> Any:
    return transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64
    )


def mamba2() -> Any:
    return transformers.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8, num_heads=8, head_dim=8
    )


def gemma3() -> Any:
    seen = {"image_size": 28, "patch_size": 14, "num_attention_heads": 4}
    small = {name: value for name, value in _SMALL.items() if name != "vocab_size"}
    return transformers.Gemma3Config(
        text_config={**_SMALL, **_HEADS, "head_dim": 8}, vision_config={**small, **seen}
    )


@pytest.mark.parametrize("make", [gpt2, mixtral, gpt_oss, t5, mamba2, gemma3])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "autocast"])
def test_a_saved_configuration_is_planned_with_every_parameter(
    make: Any, precision: str, tmp_path: Path
) -> None:
    config = make()
    config.save_pretrained(tmp_path)
    report = plan_for(str(tmp_path / "config.json"), "rtx3090", B, S, precision, suggest=False)
    maker = transformers.AutoModelForSeq2SeqLM if make is t5 else AutoModelForCausalLM
    with torch.device("meta"):
        model = built_model._built(config) if make is gemma3 else maker.from_config(config)
    assert report.description.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_the_flops_of_experts_are_those_of_a_real_step(make: Any) -> None:
    described = describe_model(make(attn_implementation="eager"), B, S, "fp32")
    one_by_one = make(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(one_by_one)
    ids = torch.randint(0, 64, (B, S), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    assert described.model_flops == counted.get_total_flops()


def test_an_encoder_and_decoder_of_other_inputs_is_not_planned_as_its_decoder_alone() -> None:
    """Whisper takes sound, and its decoder by itself is a language model in transformers."""
    with pytest.raises(ValueError, match=r"a WhisperConfig, expected the configuration of a lang"):
        describe_model(transformers.WhisperConfig(), B, S)


def test_a_configuration_is_not_changed() -> None:
    config = t5()
    before = copy.deepcopy(config.to_dict())
    describe_model(config, B, S)
    assert config.to_dict() == before


def test_one_model_built_once_is_described_as_one_built_for_each_batch() -> None:
    built = build_model(gpt2())
    for batch, precision in ((1, "bf16"), (3, "autocast"), (2, "fp32")):
        assert describe_model(built, batch, S, precision) == describe_model(
            gpt2(), batch, S, precision
        )


def test_a_plan_and_a_sweep_build_their_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2().save_pretrained(tmp_path)
    builds: list[Any] = []
    build = built_model._built

    def counted(config: Any) -> Any:
        builds.append(config)
        return build(config)

    monkeypatch.setattr(built_model, "_built", counted)
    path = str(tmp_path / "config.json")
    report = plan_for(path, "a100-40", 2, S)
    assert report.model == path
    assert len(builds) == 1
    assert len(sweep_batch(path, "a100-40", S)) > 1
    assert len(builds) == 2
    assert plan_for(gpt2(), "a100-40", 2, S).model == "GPT2Config"
    assert len(builds) == 3
