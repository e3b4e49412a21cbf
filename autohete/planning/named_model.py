"""Models by name: presets such as "7b", and the path of a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autohete.planning.built_model import BuiltModel, build_model
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.model_profile import ModelDescription, describe_gpt2, describe_model

# (layers, width, heads). The sizes in billions are GPT-2 shapes: 4096 wide as in the paper, whose
# 4B has 21 layers; 7b and 13b are the usual 32 x 4096 and 40 x 5120.
PRESETS = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
    "2b": (10, 4096, 32),
    "4b": (21, 4096, 32),
    "6b": (30, 4096, 32),
    "7b": (32, 4096, 32),
    "10b": (50, 4096, 32),
    "13b": (40, 5120, 40),
    "18b": (90, 4096, 32),
    "22b": (110, 4096, 32),
}
_MAX_LAYERS = 10_000


def load_model_config(path: Path) -> Any:
    """Return the configuration in a Hugging Face config.json.

    Raises:
        ValueError: there is none.
    """
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"model is {str(path)!r}, which is no Hugging Face config.json with a model_type; give "
            f"one, or one of {', '.join(PRESETS)}"
        ) from None
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model is {str(path)!r}, whose model_type is {kind!r}, expected one that the "
            "installed transformers knows; upgrade transformers, or plan from the model itself"
        )
    try:
        config = CONFIG_MAPPING[kind].from_json_file(str(path))
    except Exception as error:  # transformers' checks have errors of many kinds
        raise ValueError(
            f"model is {str(path)!r}, which transformers refuses "
            f"({' '.join(str(error).split())}), expected values that make a {kind}; correct them"
        ) from error
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and not 0 <= layers <= _MAX_LAYERS:
        raise ValueError(
            f"model is {str(path)!r} with {layers} layers, expected at least 0 and at most "
            f"{_MAX_LAYERS}"
        )
    return config


def describe_named(model: str, batch: int, seq: int, precision: str) -> ModelDescription:
    """Describe a preset or a config.json."""
    if model not in PRESETS:
        return describe_model(_config_named(model), batch, seq, precision)
    layers, width, heads = PRESETS[model]
    if precision != "autocast":  # which the meta device has not got
        return describe_gpt2(GPT2Shape(2, width, heads, seq), batch, seq, precision).with_layers(
            layers
        )
    from transformers import GPT2Config

    config = GPT2Config(n_layer=2, n_embd=width, n_head=heads, n_positions=seq)
    return describe_model(config, batch, seq, precision).with_layers(layers)


def built_once(model: str | Any) -> str | Any:
    """Return what plan_for() takes as it takes `model`, without building a model for each batch.

    Raises:
        ValueError: there is no such model.
    """
    if isinstance(model, str):
        if model in PRESETS:
            return model
        return replace(build_model(_config_named(model)), name=model)
    return model if isinstance(model, (nn.Module, BuiltModel)) else build_model(model)


def _config_named(model: str) -> Any:
    path = Path(model)
    if not path.is_file():
        raise ValueError(
            f"model is {model!r}, expected a config.json or one of {', '.join(PRESETS)}"
        )
    return load_model_config(path)


def describe(model: str | Any, batch: int, seq: int, precision: str) -> ModelDescription:
    """Describe what plan_for() takes."""
    if isinstance(model, str):
        return describe_named(model, batch, seq, precision)
    return describe_model(model, batch, seq, precision)


def name_of(model: str | Any) -> str:
    """Return how a report calls what plan_for() takes."""
    if isinstance(model, str):
        return model
    return model.name if isinstance(model, BuiltModel) else type(model).__name__
