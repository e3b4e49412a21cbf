"""Tiny Hugging Face Trainers on the host device, plain and under the callback, to compare."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from oracle import forced_plan
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from autohete import CPUAdamW
from autohete.integrations.transformers import AutoHeteCallback

VOCABULARY, CONTEXT = 64, 16


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=32,
            n_layer=3,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )


class Tokens(Dataset):
    """Random rows; labels ignore a number of positions that differs from row to row."""

    def __init__(self, rows: int = 96, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, VOCABULARY, (rows, CONTEXT), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def adamw(model: nn.Module) -> CPUAdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return CPUAdamW(groups, lr=3e-3)


def callback(model: nn.Module, **options: Any) -> AutoHeteCallback:
    """Everything is offloaded and recomputed unless the options say otherwise."""
    if "gpu_mem" not in options:
        options = {"gpu_mem": "16MiB", "plan": forced_plan(model, "all+c"), **options}
    return AutoHeteCallback(model, **{"cpu_mem": "64MiB", "profile_path": None, **options})


def trainer(
    *,
    ours: bool | dict[str, Any],
    build: Callable[[], nn.Module] = gpt2,
    optimizer: Callable[[nn.Module], Any] | None = adamw,
    before: Sequence[TrainerCallback] = (),
    after: Sequence[TrainerCallback] = (),
    folder: Any = None,
    **arguments: Any,
) -> Trainer:
    """`ours` are the callback's options, True for the usual ones, False for the plain Trainer."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # 4.57 leaves its last value there
    model = build()
    callbacks = list(before)
    if ours is False:
        # As Trainer 5 does. 4.57 leaves it on, and bf16 attention with a cache rounds otherwise.
        model.config.use_cache = False
    else:
        callbacks.append(callback(model, **({} if ours is True else ours)))
    callbacks += after
    known = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
    }
    args = TrainingArguments(
        str(folder or tempfile.mkdtemp(dir=".")),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{**known, **arguments},
    )
    return Trainer(
        model,
        args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(16, seed=1),
        callbacks=callbacks,
        optimizers=(optimizer(model) if optimizer else None, None),
    )


def trained(**keywords: Any) -> Trainer:
    made = trainer(**keywords)
    train(made)
    return made


def train(trainer: Trainer, **keywords: Any) -> None:
    """Train from the same random state, whatever ran before."""
    set_seed(42)
    trainer.train(**keywords)


def ours_of(trainer: Trainer) -> AutoHeteCallback:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, AutoHeteCallback))


LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch", "step")


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """What the Trainer logged, without its timings and without our own figures."""
    return [{k: e[k] for k in LOGGED if k in e} for e in trainer.state.log_history]


def inner_optimizer(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_same_training(ours: Trainer, plain: Trainer) -> None:
    """Logs, weights, and the optimizer's whole state, to the bit."""
    assert repr(logged(ours)) == repr(logged(plain))  # as text, since norms may be NaN
    a, b = inner_optimizer(ours), inner_optimizer(plain)
    pairs = list(zip(ours.model.named_parameters(), plain.model.named_parameters(), strict=True))
    stateless = all(group.get("momentum") == 0 for group in b.param_groups)  # SGD of 4.57
    assert stateless or any(b.state.get(q) for _, (_, q) in pairs), "the optimizer has a state"
    for (name, p), (_, q) in pairs:
        assert torch.equal(p, q), f"{name}: weights differ"
        state, expected = a.state.get(p, {}), b.state.get(q, {})
        assert state.keys() == expected.keys(), name
        for key, value in expected.items():
            if isinstance(value, Tensor):
                assert torch.equal(state[key], value), f"{name}: {key} differs"
