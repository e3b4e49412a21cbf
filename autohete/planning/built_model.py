"""The language model of a Hugging Face configuration, on fake tensors: nothing is allocated.

A long model takes seconds to build: built once, it is described for all batches asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow, and presets do without

    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class BuiltModel:
    """A module and the mode in which it is copied and run. It is not run itself."""

    module: nn.Module
    kind: str
    """The class of what was given."""
    of_configuration: bool = True
    name: str = ""
    """Of the model, in a report."""
    mode: Any = field(default_factory=_fake_mode)
    agreed: list[Any] = field(default_factory=list)
    """Where the first layers of a long list were seen to stand for all (long_models.py)."""


def build_model(config: Any) -> BuiltModel:
    """Return the model of a configuration, ready to be described.

    Raises:
        ValueError: it is no language model's configuration, or its numbers do not fit each other.
    """
    mode = _fake_mode()
    with mode:
        try:
            built = _built(copy.deepcopy(config))
        except ImportError as error:
            raise RuntimeError(
                "planning from a configuration needs transformers; pip install transformers"
            ) from error
    built.config.use_cache = False
    if getattr(built.config, "decoder_start_token_id", None) is None:
        built.config.decoder_start_token_id = 0  # without one a T5 does not train; any will do here
    if getattr(built, "loss_type", "") is None:  # else transformers warns, and takes this one
        built.loss_type = "ForCausalLM"
    kind = type(config).__name__
    return BuiltModel(built, kind, name=kind, mode=mode)


def _built(config: Any) -> Any:
    """The language model of a configuration; of an encoder and a decoder both."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
    )

    kinds: list[tuple[Any, Any]] = [(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM)]
    if not getattr(config, "is_encoder_decoder", False):  # else it would be the decoder alone
        kinds.insert(0, (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM))
    makers = [maker for mapping, maker in kinds if type(config) in mapping]
    if not makers:
        raise ValueError(
            f"describe_model: the model is a {type(config).__name__}, expected the configuration "
            "of a language model (input_ids in, labels in); give the module itself"
        )
    try:
        with _nothing_drawn():
            return makers[0].from_config(config)
    except Exception as error:  # whatever a model's code does with numbers that do not fit
        raise ValueError(
            f"describe_model: no model can be made of this {type(config).__name__} "
            f"({type(error).__name__}: {' '.join(str(error).split())}), expected numbers that fit "
            "each other; correct them"
        ) from error


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Leave initial values out: fake weights have none, and some models read what they draw."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self, *args, **kwargs: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = original
