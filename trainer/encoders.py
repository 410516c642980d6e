"""Builders of encoders, models that return a state per token, that `models.<name>.build` names."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from transformers import AutoModel, PreTrainedModel

from trainer.models import BuildKeys, build_from_config, load_pretrained


def encoder(name: str, *, dtype: torch.dtype, **keys: Unpack[BuildKeys]) -> PreTrainedModel:
    """Returns a pretrained model without a head; its output has `last_hidden_state`, (batch, time, hidden).

    Args:
        name: A hub name, a folder, a .gguf file, or `embedded:<asset>`.
    """
    return load_pretrained(AutoModel, name, dtype=dtype, **keys)


def encoder_from_config(
    config: str | Mapping[str, Any], *, dtype: torch.dtype, **keys: Unpack[BuildKeys]
) -> PreTrainedModel:
    """Returns the same with random start weights.

    Args:
        config: A folder or hub name whose config is taken, or a mapping with `model_type`.
    """
    return build_from_config(AutoModel, config, dtype=dtype, **keys)
