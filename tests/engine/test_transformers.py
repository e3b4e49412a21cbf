"""Hugging Face models, saved files and generation: as in plain PyTorch, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import batch
from oracle import Result, adamw, assert_bit_equal, forced_plan, train
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.units import find_units

transformers = pytest.importorskip("transformers")

STEPS = 5


def build(name: str) -> Any:
    torch.manual_seed(0)
    common = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama_like = {
        **common, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "attention_dropout": 0.1,
    }  # fmt: skip
    t = transformers
    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=4)
        )
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**llama_like))
    if name == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**llama_like, tie_word_embeddings=True))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**llama_like, head_dim=8))
    if name == "mixtral":
        config = t.MixtralConfig(
            **llama_like, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
        )
        return t.MixtralForCausalLM(config)
    if name == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**llama_like, sliding_window=8, head_dim=8))
    if name == "gemma":
        return t.GemmaForCausalLM(t.GemmaConfig(**llama_like, head_dim=8))
    if name == "phi":
        config = t.PhiConfig(**llama_like, resid_pdrop=0.1, embd_pdrop=0.1)
        return t.PhiForCausalLM(config)
    if name == "vit":
        return t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
                image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.1,
            )
        )  # fmt: skip
    if name == "encoder":
        return Encoder()
    if name == "encoder, norm first":
        return Encoder(norm_first=True)
    if name == "bert":
        return t.BertForMaskedLM(
            t.BertConfig(**common, intermediate_size=64, max_position_embeddings=16)
        )
    config = t.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config)


class Encoder(nn.Module):
    """torch's own encoder between an embedding and a head; padded, so that eval has a fast path."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        padded = torch.zeros(input_ids.shape, dtype=torch.bool)
        padded[0, -3:] = True
        x = self.encoder(self.tokens(input_ids), src_key_padding_mask=padded)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


NAMES = (
    "gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "mixtral", "phi", "bert", "t5", "vit",
    "encoder",
)  # fmt: skip
MIXED = ("all+c", "state", "device+c", "all", "state+c")


def mixed_plan(model: nn.Module) -> Any:
    """Every kind of placement in turn, from unit to unit."""
    kinds = {index: MIXED[index % len(MIXED)] for index in range(len(find_units(model)))}
    return forced_plan(model, kinds)


PLANS: dict[str, dict[str, Any]] = {
    "mixed": {"plan": mixed_plan},
    "all+c": {"plan": partial(forced_plan, kinds="all+c")},
    "state": {"plan": partial(forced_plan, kinds="state")},
    "planned": {"gpu_mem": "8MiB"},
}


def loop(model: Any, optimizer: Any, step: int) -> float:
    loss = model(**inputs(model, step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def inputs(model: Any, step: int) -> dict[str, Any]:
    if hasattr(model, "vit"):
        generator = torch.Generator().manual_seed(step)
        return {
            "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 10, (3,), generator=generator),
        }
    tokens = batch(step)[0].contiguous()
    return {"input_ids": tokens, "labels": tokens}


@cache
def plain(name: str) -> Result:
    return train(wrap=None, steps=STEPS, build=partial(build, name), loop=loop)


@pytest.mark.parametrize("name", NAMES)
def test_model_definitions_nobody_here_wrote_give_the_bits_of_plain_training(name):
    ours = train(wrap=PLANS["mixed"], steps=STEPS, build=partial(build, name), loop=loop)
    assert_bit_equal(ours, plain(name))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_model_definitions_give_the_bits_of_plain_training_under_every_plan(name, plan):
    ours = train(wrap=PLANS[plan], steps=STEPS, build=partial(build, name), loop=loop)
    assert_bit_equal(ours, plain(name))


@pytest.mark.parametrize("name", ["encoder", "encoder, norm first", "gpt2", "mixtral", "vit"])
def test_outputs_in_eval_right_after_a_step_are_those_of_plain_training(name):
    def evaluating(written: list[Any]) -> Callable[..., float]:
        def run(model: Any, optimizer: Any, step: int) -> float:
            loss = loop(model, optimizer, step)
            model.eval()
            with torch.no_grad():
                written.append(model(**inputs(model, step + 50)).logits.clone())
            model.train()
            return loss

        return run

    expected: list[Any] = []
    reference = train(wrap=None, steps=3, build=partial(build, name), loop=evaluating(expected))
    for plan in ("mixed", "all+c"):
        ours: list[Any] = []
        result = train(wrap=PLANS[plan], steps=3, build=partial(build, name), loop=evaluating(ours))
        assert_bit_equal(result, reference)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_enable_changes_no_bit(name, reentrant):
    def checkpointed() -> Any:
        model = build(name)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    expected = train(wrap=None, steps=STEPS, build=checkpointed, loop=loop)
    for keywords in PLANS.values():
        ours = train(wrap=keywords, steps=STEPS, build=checkpointed, loop=loop)
        assert_bit_equal(ours, expected)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generation_between_steps_is_that_of_plain_training(name, plan):
    def generating(written: list[Any]) -> Callable[..., float]:
        def run(model: Any, optimizer: Any, step: int) -> float:
            loss = loop(model, optimizer, step)
            model.eval()
            tokens = batch(step)[0][:, :4]
            written.append(
                model.generate(tokens, max_new_tokens=6, do_sample=step % 2 == 1, pad_token_id=0)
            )
            model.train()
            return loss

        return run

    expected: list[Any] = []
    reference = train(wrap=None, steps=3, build=partial(build, name), loop=generating(expected))
    ours: list[Any] = []
    result = train(wrap=PLANS[plan], steps=3, build=partial(build, name), loop=generating(ours))
    assert_bit_equal(result, reference)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


# ------------------------------------------------------------------- files


def sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def after_training(name: str, *, wrapped: bool) -> tuple[Any, Any]:
    """A model after two steps, with its updates perhaps still in flight."""
    model = build(name)
    optimizer = adamw(model)
    trained: Any = model
    if wrapped:
        plan = forced_plan(model, "all+c")
        trained = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", plan=plan).to("cpu")
    torch.manual_seed(7)
    for step in range(2):
        loop(trained, optimizer, step)
    return trained, optimizer


def save_pretrained(model: Any, optimizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def save_model(model: Any, optimizer: Any, folder: Path) -> None:
    from safetensors.torch import save_model

    save_model(getattr(model, "module", model), str(folder / "model.safetensors"))


def accelerate_save_model(model: Any, optimizer: Any, folder: Path) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(model, folder)


def accelerate_save_state(model: Any, optimizer: Any, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator._models.append(model)  # what prepare() does with what it is given
    accelerator._optimizers.append(optimizer)
    accelerator.save_state(str(folder))


def save_checkpoint(model: Any, optimizer: Any, folder: Path) -> None:
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "all.pt"
    )


def tensors_of(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return {}


@pytest.mark.parametrize(
    "save",
    [save_pretrained, save_model, accelerate_save_model, accelerate_save_state, save_checkpoint],
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "t5"])  # tied, not tied, tied, shared
def test_saved_files_have_every_key_at_plain_size(name, save, tmp_path):
    folders = {}
    for kind in ("plain", "ours"):
        folders[kind] = tmp_path / kind
        folders[kind].mkdir()
        model, optimizer = after_training(name, wrapped=kind == "ours")
        save(model, optimizer, folders[kind])
        if kind == "ours":
            model.unwrap()
    ours, expected = sizes(folders["ours"]), sizes(folders["plain"])
    assert ours.keys() == expected.keys()
    for file, size in expected.items():
        assert ours[file] == pytest.approx(size, rel=0.01), file
        saved = tensors_of(folders["ours"] / file)
        reference = tensors_of(folders["plain"] / file)
        assert saved.keys() == reference.keys()
        assert all(torch.equal(saved[key], reference[key]) for key in reference), file


def test_a_saved_pretrained_model_is_loaded_and_wrapped_and_trains_on(tmp_path):
    model, _ = after_training("llama", wrapped=True)
    model.save_pretrained(tmp_path)
    model.unwrap()

    def from_disk() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()

    expected = train(wrap=None, steps=3, build=from_disk, loop=loop)
    for keywords in PLANS.values():
        assert_bit_equal(train(wrap=keywords, steps=3, build=from_disk, loop=loop), expected)


def test_accelerate_prepared_pair_trains_to_the_bits_of_plain_training():
    from accelerate import Accelerator

    def run(*, wrapped: bool) -> tuple[Any, list[float]]:
        model = build("gpt2")
        optimizer: Any = CPUAdamW(model.parameters(), lr=3e-3)
        accelerator = Accelerator(cpu=True)
        trained: Any = model
        if wrapped:
            plan = forced_plan(model, "all+c")
            trained = AutoHeteWrapper(model, optimizer, gpu_mem="16MiB", plan=plan).to("cpu")
        trained, optimizer = accelerator.prepare(trained, optimizer)
        torch.manual_seed(7)
        losses = []
        for step in range(4):
            tokens, _ = batch(step)
            with accelerator.accumulate(trained):
                loss = trained(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(trained.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    plain_model, expected = run(wrapped=False)
    model, losses = run(wrapped=True)
    assert losses == expected
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(p, q)
