"""Builders of models with one scalar head, for texts or for tokens, that `models.<name>.build` names."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from trainer.adapters import CONFIG_FILE, base_class
from trainer.assets import PREFIX
from trainer.config import ConfigError
from trainer.models import BuildKeys, LoadKeys, build_from_config, empty_model, load_config, load_reported, tell_loading

log = logging.getLogger("trainer.models")

TARGETS = ("trainer.scorers.sequence_scorer", "trainer.scorers.token_scorer")  # those that read weights
_HEADED = ("ForSequenceClassification", "ForTokenClassification")


def sequence_scorer(name: str, *, dtype: torch.dtype, **keys: Unpack[LoadKeys]) -> PreTrainedModel:
    """Returns a model with a score per text, such as a reward model: transformers' sequence classification, one label.

    A language model is given a fresh head, which the seed decides; no dropout.

    Args:
        name: A hub name, a folder, a .gguf file, or `embedded:<asset>`.
    """
    return _load(AutoModelForSequenceClassification, name, dtype=dtype, **keys)


def token_scorer(name: str, *, dtype: torch.dtype, **keys: Unpack[LoadKeys]) -> PreTrainedModel:
    """Returns a model with a score per token, such as a critic: transformers' token classification, one label.

    A language model is given a head of zeros, since it knows nothing yet of a return (as in the published code of
    arXiv:1909.08593); that of a reward model is kept. No dropout.

    Args:
        name: A hub name, a folder, a .gguf file, or `embedded:<asset>`.
    """
    return _load(AutoModelForTokenClassification, name, spread=0.0, dtype=dtype, **keys)


def sequence_scorer_from_config(
    config: str | Mapping[str, Any], *, dtype: torch.dtype, **keys: Unpack[BuildKeys]
) -> PreTrainedModel:
    """Returns the same as `sequence_scorer` with random start weights.

    Args:
        config: A folder or hub name whose config is taken, or a mapping with `model_type`.
    """
    return _build(AutoModelForSequenceClassification, config, dtype=dtype, **keys)


def token_scorer_from_config(
    config: str | Mapping[str, Any], *, dtype: torch.dtype, **keys: Unpack[BuildKeys]
) -> PreTrainedModel:
    """Returns the same as `token_scorer` with random start weights.

    Args:
        config: A folder or hub name whose config is taken, or a mapping with `model_type`.
    """
    return _build(AutoModelForTokenClassification, config, dtype=dtype, **keys)


def find_head_problem(key: str, build: Mapping[str, Any]) -> list[str]:
    """Returns why the scores of a frozen model would be random: no head is in its files.

    Args:
        key: Where the node stands, such as models.reward.build.
    """
    if build.get("_target_") not in TARGETS:
        return []
    name = str(build["name"])
    architectures = architectures_of(name, trust_remote_code=bool(build.get("trust_remote_code", False)))
    if architectures is None or any(word.endswith(_HEADED) for word in architectures):
        return []
    found = ", ".join(architectures) or "no architecture is named"
    problem = f"its files hold no scalar head ({found}), so that the scores of a frozen model would be random"
    return [f"{key}.name={name}: {problem}; give a trained one, such as the export of task=reward"]


def find_adapter_problem(key: str, build: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Returns why a model with LoRA would keep the head that it starts with, which is not in its files.

    Args:
        key: Where the model stands, such as models.reward.
        settings: Those of LoRA.
    """
    listed = [settings.get(word) or () for word in ("modules_to_save", "target_modules")]
    trained = {str(name).rpartition(".")[2] for names in listed if not isinstance(names, str) for name in names}
    if not find_head_problem(key, build) or not (heads := _heads_of(build) - trained):
        return []
    first = sorted(heads)[0]
    problem = f"{key}.lora freezes all weights but the adapters', also the scalar head, which is not in the files"
    return [f"{problem}; add {first} to {key}.lora.modules_to_save"]


def find_frozen_head(key: str, build: Mapping[str, Any], patterns: list[str]) -> list[str]:
    """Returns why globs of weights to freeze would keep the head that a model starts with; see above."""
    weights = {f"{head}.weight" for head in _heads_of(build)} if find_head_problem(key, build) else set()
    covering = [pattern for pattern in patterns if fnmatch.filter(weights, pattern)]
    problem = f"{key}.freeze={covering} freezes the scalar head, which is not in the files"
    return [f"{problem}; drop that, so that it can learn"] if covering else []


def _heads_of(build: Mapping[str, Any]) -> set[str]:
    """Returns the names of a model's scalar heads; the usual ones where its config is not at hand."""
    empty = empty_model(build)
    return {name.rpartition(".")[0] for name, _ in _head_weights(empty)} if empty is not None else {"score"}


def architectures_of(name: str, *, trust_remote_code: bool) -> list[str] | None:
    """Returns the classes that a model's files are of, as they say; None where its name leads to no model.

    An embedded asset or a .gguf file, which need not be there yet, is a language model.
    """
    if name.startswith(PREFIX) or name.endswith(".gguf"):
        return ["a language model"]
    folder = Path(name).expanduser()
    if (folder / CONFIG_FILE).exists() and not (folder / "config.json").exists():
        return [base_class(folder)]
    try:
        return list(load_config(name, key="name", trust_remote_code=trust_remote_code).architectures or ())
    except ConfigError:
        return None


def _load(
    kind: type[_BaseAutoModelClass], name: str, *, dtype: torch.dtype, spread: float = 1.0, **keys: Unpack[LoadKeys]
) -> PreTrainedModel:
    model, loading = load_reported(kind, name, dtype=dtype, adapt=partial(_make_scalar, name=name), **keys)
    drawn = _draw_heads(model, set(loading["missing_keys"]), spread=spread)
    is_fresh = any(key.endswith("weight") for key in drawn)
    if is_fresh:
        start = "at random" if spread else "at 0"
        log.info("%s: %s is not in the files: the scalar head starts %s", name, ", ".join(sorted(drawn)), start)
    # What there is besides the trunk, where this head is missing, is another head.
    others = {key for key in loading["unexpected_keys"] if not is_fresh or key.startswith(model.base_model_prefix)}
    tell_loading(name, {"missing_keys": set(loading["missing_keys"]) - drawn, "unexpected_keys": others})
    return model


def _build(
    kind: type[_BaseAutoModelClass],
    config: str | Mapping[str, Any],
    *,
    dtype: torch.dtype,
    **keys: Unpack[BuildKeys],
) -> PreTrainedModel:
    adapt = partial(_make_scalar, name=str(config))
    model = build_from_config(kind, config, dtype=dtype, adapt=adapt, **keys)
    _draw_heads(model, {name for name, _ in model.named_parameters()})
    return model


def _make_scalar(config: PretrainedConfig, *, name: str) -> None:
    """Gives a config one label, no dropout, and a pad token, without which transformers' forward refuses a batch."""
    labels, is_headed = config.num_labels, any(word.endswith(_HEADED) for word in config.architectures or ())
    if is_headed and labels != 1:
        raise ConfigError(f"build.name={name}: its head gives {labels} labels; a scalar head, of one, is needed")
    config.num_labels = 1
    text = config.get_text_config()
    for word, value in text.to_dict().items():
        if isinstance(value, float) and ("dropout" in word or word.endswith("pdrop")):
            setattr(text, word, 0.0)
    text.classifier_dropout = 0.0
    if text.pad_token_id is None:
        ends = text.eos_token_id
        text.pad_token_id = ends[0] if isinstance(ends, list) else ends if ends is not None else 0


def _draw_heads(model: PreTrainedModel, names: set[str], *, spread: float = 1.0) -> set[str]:
    """Draws those of the heads' linear weights that are named, and returns which those are.

    Their variance is 1/(width+1) (Stiennon et al., arXiv:2009.01325, appendix B.1), biases are zero. The numbers follow
    from the random state that the build began with, and not from what was drawn since, which differs between ranks and
    ZeRO stages.

    Args:
        spread: Multiplies the weights.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from trainer.handle import full_shape, is_sharded

    generator = torch.Generator().manual_seed(torch.initial_seed())
    drawn = {name: parameter for name, parameter in _head_weights(model) if name in names}
    for parameter in drawn.values():
        shape = full_shape(parameter)
        values = torch.zeros(shape)
        if len(shape) == 2:
            values.normal_(std=spread / math.sqrt(shape[1] + 1), generator=generator)
        with torch.no_grad(), GatheredParameters([parameter] if is_sharded(parameter) else [], modifier_rank=0):
            parameter.data.copy_(values)
    return set(drawn)


def _head_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not path.startswith(f"{model.base_model_prefix}."):
            yield from ((f"{path}.{name}", parameter) for name, parameter in module.named_parameters(recurse=False))
