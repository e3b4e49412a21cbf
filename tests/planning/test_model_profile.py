"""A model's bytes and FLOPs, from fake tensors, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from autohete.planning import (
    describe_model,
    find_machine,
    long_models,
    model_profile,
    profile_model,
)
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.library import MACHINES
from autohete.planning.model_profile import describe_gpt2
from autohete.planning.plan_report import plan_for

B, S, H = 2, 8, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, H)
        self.layers = nn.ModuleList(Mlp() for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_bytes_and_flops_of_a_layer_are_those_done_by_hand() -> None:
    described = describe_model(Net(), B, S, "fp32")
    layer = described.units[1]
    assert [unit.name for unit in described.units] == ["embed", "layers.0", "layers.1", "layers.2"]
    assert layer.num_parameters == 8 * H * H + 5 * H
    assert layer.param_bytes == layer.grad_bytes == 4 * layer.num_parameters
    assert layer.state_bytes == 8 * layer.num_parameters
    assert layer.master_bytes == 4 * layer.num_parameters
    tokens = B * S
    assert layer.activation_bytes == 4 * tokens * (H + 4 * H)  # both inputs; relu's is the second
    assert layer.checkpoint_bytes == 4 * tokens * H
    assert layer.forward_flops == 2 * tokens * 8 * H * H
    assert layer.backward_flops == 2 * layer.forward_flops
    assert layer.temporary_bytes >= 4 * tokens * 4 * H  # the gradient of relu's output at least


def test_half_precision_halves_activations_and_adds_masters() -> None:
    full, half = (describe_model(Net(), B, S, p).units[1] for p in ("fp32", "bf16"))
    assert half.activation_bytes * 2 == full.activation_bytes
    assert (half.param_bytes, half.state_bytes, half.master_bytes) == (
        2 * half.num_parameters,
        12 * half.num_parameters,
        0,
    )


def test_autocast_keeps_fp32_parameters_and_a_half_copy_until_backward() -> None:
    layer = describe_model(Net(), B, S, "autocast").units[2]
    parameters, tokens = 8 * H * H + 5 * H, B * S
    assert layer.param_bytes == layer.grad_bytes == layer.master_bytes == 4 * parameters
    assert layer.state_bytes == 8 * parameters
    assert layer.half_copy_bytes == 2 * parameters
    assert layer.activation_bytes == 2 * tokens * (H + 4 * H) + 2 * parameters
    # Its input comes in half precision, the first layer's in fp32, and they are described alike.
    assert layer.checkpoint_bytes == 4 * tokens * H + 2 * parameters


def test_under_autocast_links_carry_four_bytes_and_layers_run_at_the_half_rate() -> None:
    half, autocast = (profile_model(Net(), B, S, p) for p in ("bf16", "autocast"))
    for a, b in zip(half.units[1:], autocast.units[1:], strict=True):
        assert b.param_bytes == 2 * a.param_bytes
        assert b.grad_bytes == 2 * a.grad_bytes
    config = GPT2Config(n_layer=2, n_embd=2560, n_head=20, vocab_size=128, n_positions=512)
    seconds = {}
    for precision in ("fp32", "bf16", "autocast"):
        units = profile_model(config, 8, 512, precision).units
        seconds[precision] = max(unit.forward_seconds for unit in units)
    assert seconds["autocast"] == pytest.approx(seconds["bf16"], rel=0.05)
    assert seconds["fp32"] > 1.8 * seconds["autocast"]


def test_a_frozen_layer_has_no_gradients_nor_state() -> None:
    net = Net()
    net.layers[1].requires_grad_(False)
    frozen = describe_model(net, B, S, "fp32").units[2]
    assert frozen.grad_bytes == frozen.state_bytes == 0 < frozen.param_bytes


def test_the_live_model_is_not_touched() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    describe_model(net, B, S, "bf16")
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in net.parameters())


def test_a_configuration_is_described_as_the_model_it_builds() -> None:
    config = GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=128, n_positions=32)
    described = describe_model(config, 2, 32, "fp32")
    model = GPT2LMHeadModel(config)
    assert described.num_parameters == sum(p.numel() for p in model.parameters())
    model.config.use_cache = False  # for generation; of a configuration it is left out
    live = describe_model(model, 2, 32, "fp32")
    assert [(u.name, u.activation_bytes, u.forward_flops) for u in described.units] == [
        (u.name, u.activation_bytes, u.forward_flops) for u in live.units
    ]


def test_gpt2_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32)
    layer = describe_model(config, 2, 32, "fp32").units[2]
    tokens, width, seq = 64, 64, 32
    assert layer.forward_flops == 24 * tokens * width**2 + 4 * tokens * seq * width


def test_more_layers_are_the_same_layer_again() -> None:
    def config(layers: int) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            vocab_size=128,
        )

    grown = describe_model(config(2), 2, 16, "bf16").with_layers(5)
    direct = describe_model(config(5), 2, 16, "bf16")
    assert [u.name for u in grown.units] == [u.name for u in direct.units]
    assert grown.num_parameters == direct.num_parameters
    assert [u.activation_bytes for u in grown.units] == [u.activation_bytes for u in direct.units]


@pytest.mark.parametrize("bad", [{"batch": 0}, {"seq": -1}, {"batch": 1.5}, {"precision": "int8"}])
def test_arguments_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        describe_model(**{"model": Net(), "batch": 1, "seq": 4, **bad})


def test_a_model_that_cannot_run_on_fake_tensors_says_so() -> None:
    class Reads(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * float(ids.float().sum())

    with pytest.raises(ValueError, match="does not run on fake tensors"):
        describe_model(Reads(), B, S, "fp32")


@pytest.mark.parametrize("name", list(MACHINES))
def test_every_known_machine_makes_a_valid_profile_and_names_its_sources(name: str) -> None:
    profile = profile_model(Net(), B, S, gpu=name)
    assert all(unit.forward_seconds > 0 for unit in profile.units)
    assert "[R]" in MACHINES[name].sources


def test_machines_can_be_overridden_and_unknown_fields_are_refused() -> None:
    machine = find_machine("a100-40", pcie=3, cpu_params_per_second=2.5e9)
    assert (machine.h2d_bytes_per_second, machine.cpu_params_per_second) == (12e9, 2.5e9)
    for keyword in ({"pcie": 9}, {"speed": 1}):
        with pytest.raises(ValueError, match=next(iter(keyword))):
            find_machine("a100-40", **keyword)
    with pytest.raises(ValueError, match="gpu is 'b9000'"):
        find_machine("b9000")


@pytest.mark.parametrize("fused_gelu", [False, True])
@pytest.mark.parametrize(("batch", "seq", "precision"), [(2, 64, "bf16"), (1, 128, "fp32")])
def test_a_preset_is_described_as_transformers_own_model_is(
    batch: int, seq: int, precision: str, fused_gelu: bool
) -> None:
    """But for what fake tensors on a CPU have and a GPU has not: a mask, half statistics."""
    item = 2 if precision == "bf16" else 4
    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, n_positions=seq)
    if fused_gelu:
        config.activation_function = "gelu_pytorch_tanh"
    theirs = describe_model(config, batch, seq, precision)
    ours = describe_gpt2(GPT2Shape(2, 256, 4, seq, fused_gelu), batch, seq, precision)
    assert ours.num_parameters == theirs.num_parameters
    assert ours.model_flops == theirs.model_flops
    assert ours.fixed_device_bytes == theirs.fixed_device_bytes
    mask, statistics = batch * seq * seq * item, 2 * batch * seq * (4 - item)
    for mine, other in zip(ours.units, theirs.units, strict=True):
        assert (mine.name, mine.is_layer) == (other.name, other.is_layer)
        for field in ("param_bytes", "grad_bytes", "state_bytes", "checkpoint_bytes"):
            assert getattr(mine, field) == getattr(other, field)
        norms = 2 if mine.is_layer else int(mine.name == "transformer.ln_f")
        expected = other.activation_bytes + norms * statistics - (mask if mine.is_layer else 0)
        assert mine.activation_bytes == expected
        assert mine.temporary_bytes == pytest.approx(other.temporary_bytes, rel=0.25)


SIZES = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "bart": {
        "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 2,
        **ATTENTION,
    },
    "t5": {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_one_kind_are_described_alike_whatever_they_share(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **KINDS[kind])
    description = describe_model(config, 1, 16)
    layers = [unit for unit in description.units if unit.is_layer]
    assert len(layers) == (3 if kind == "mamba" else 6)  # of an encoder and a decoder both
    for unit in layers:
        others = [replace(other, name=unit.name) for other in layers if other.kind == unit.kind]
        assert all(other == unit for other in others)
    plan_for(config, "a100-40", 1, 16)  # which refuses unlike layers of one kind


def test_a_configuration_of_no_language_model_is_named() -> None:
    with pytest.raises(ValueError, match="a ViTConfig, expected the configuration of a language"):
        describe_model(transformers.ViTConfig(), 1, 16)
    config = transformers.GPT2Config(n_layer=1, n_embd=65, n_head=4)
    with pytest.raises(ValueError, match="no model can be made of this GPT2Config .*65"):
        describe_model(config, 1, 16)


def llama(layers: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, **more,
    )  # fmt: skip


def gemma3(layers: int) -> Any:
    """Five layers that look at a window, one that looks at everything."""
    return transformers.Gemma3TextConfig(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32,
    )  # fmt: skip


def mixtral(layers: int) -> Any:
    """Its loss is made of all layers' router logits."""
    return transformers.MixtralConfig(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, vocab_size=32, output_router_logits=True,
    )  # fmt: skip


class Late(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """From some layer on there is more to do."""

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> Any:
        if self.self_attn.layer_idx >= 20:
            hidden_states = torch.tanh(torch.tanh(hidden_states))
        return super().forward(hidden_states, **keywords)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []
    run = model_profile._run_step

    def counted(model: nn.Module, *arguments: Any) -> Any:
        runs.append(len(model.get_submodule("model.layers")))  # type: ignore[arg-type]
        return run(model, *arguments)

    monkeypatch.setattr(model_profile, "_run_step", counted)
    return runs


@pytest.mark.parametrize(("config", "runs"), [(llama, [24, 12]), (gemma3, [24, 12])])
def test_a_long_model_is_described_as_if_all_its_layers_had_run(
    config: Any, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = describe_model(config(50), B, S, "bf16")  # not long
    monkeypatch.setattr(long_models, "LAYERS_RUN", 24)
    monkeypatch.setattr(model_profile, "LAYERS_RUN", 24)
    seen = count_runs(monkeypatch)
    assert describe_model(config(50), B, S, "bf16") == whole
    assert seen == runs


@pytest.mark.parametrize("kind", ["router logits", "more from a layer on"])
def test_a_long_model_runs_whole_where_its_layers_are_not_all_alike(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "more from a layer on":
        monkeypatch.setattr(transformers.models.llama.modeling_llama, "LlamaDecoderLayer", Late)
    config = mixtral(50) if kind == "router logits" else llama(50)
    whole = describe_model(config, B, S, "bf16")
    monkeypatch.setattr(long_models, "LAYERS_RUN", 24)
    monkeypatch.setattr(model_profile, "LAYERS_RUN", 24)
    seen = count_runs(monkeypatch)
    assert describe_model(config, B, S, "bf16") == whole
    assert seen[-1] == 50


def test_a_live_model_runs_whole_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = describe_model(Net(50), B, S, "fp32")
    monkeypatch.setattr(long_models, "LAYERS_RUN", 24)
    monkeypatch.setattr(long_models, "shortened", None)
    assert describe_model(Net(50), B, S, "fp32") == whole
