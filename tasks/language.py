"""Causal language models inside tasks: the positions that count, and each model's logits there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tasks.vocabulary import shared_vocabulary
from trainer import IGNORED, Batch, ModelHandle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BATCH_FIELDS = ("input_ids", "labels")


def all_mask(batch: Batch) -> Tensor:
    """Returns which positions hold a real token whose next token is real and of the same document, (B, T-1) bool.

    Without a 2-D attention mask every token is real; packed documents are told apart by `position_ids`.
    """
    tokens, attended = batch["input_ids"], batch.get("attention_mask")
    is_real = (
        attended != 0 if attended is not None and attended.ndim == 2 else torch.ones_like(tokens, dtype=torch.bool)
    )
    mask: Tensor = is_real[:, :-1] & is_real[:, 1:]
    if "position_ids" in batch:
        positions = batch["position_ids"]
        mask = mask & (positions[:, 1:] == positions[:, :-1] + 1)
    return mask


def completion_mask(batch: Batch) -> Tensor:
    """Returns those positions of `all_mask` whose next token has a label, (B, T-1) bool."""
    has_label: Tensor = batch["labels"][:, 1:] != IGNORED
    return all_mask(batch) & has_label


MASKS: dict[str, Callable[[Batch], Tensor]] = {"completion": completion_mask, "all": all_mask}


def next_tokens(batch: Batch, counted: Tensor) -> Tensor:
    """Returns the right next tokens of the positions that count, (N,).

    Where a mask counts prompts, which have no label, the label is the token itself.
    """
    tokens, labels = batch["input_ids"], batch["labels"]
    return torch.where(labels == IGNORED, tokens, labels)[:, 1:][counted]


def counted_logits(model: ModelHandle, batch: Batch, counted: Tensor, *, vocabulary: int | None = None) -> Tensor:
    """Returns a model's logits of the positions that count, (N, V) in float32.

    Args:
        counted: Which positions do, (B, T-1); position t holds the logits after token t, of the label of token t+1.
        vocabulary: The first so many logits; None: all.
    """
    columns = counted.any(0).nonzero().squeeze(-1)
    if len(columns) == 0:  # an empty batch must run the same modules as the other ranks'
        columns = columns.new_zeros(1)
    logits = _forward(model, batch, columns)  # (B, K, V), or (B, T, V) of a model that knows no columns
    if logits.shape[1] == batch["input_ids"].shape[1]:
        logits = logits[:, columns]
    rows = counted[:, columns].flatten().nonzero().squeeze(-1)
    return logits.flatten(0, 1).index_select(0, rows)[:, :vocabulary].float()


def _forward(model: ModelHandle, batch: Batch, columns: Tensor) -> Tensor:
    given = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
    optional: dict[str, Any] = {"use_cache": False, "logits_to_keep": columns}
    if "position_ids" not in batch and "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        # From the first real token on: left padding must not move a model with absolute positions.
        optional["position_ids"] = (batch["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    accepted = accepted_arguments(model.module)
    output = model(**given, **{key: value for key, value in optional.items() if key in accepted})
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def accepted_arguments(module: nn.Module) -> set[str]:
    """Returns which optional arguments the module's forward takes, by name or through **kwargs."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in ("use_cache", "logits_to_keep", "position_ids") if takes_any or name in parameters}


def common_vocabulary(models: Sequence[ModelHandle], *, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Returns how many logits all models share; None: all, of models that are not transformers'."""
    configs = {model.name: getattr(model.module, "config", None) for model in models}
    known = {name: config for name, config in configs.items() if isinstance(config, PreTrainedConfig)}
    if len(known) < len(configs):
        return None  # the losses refuse logits of different sizes
    return shared_vocabulary(known, tokenizer=tokenizer)


def perplexities(metrics: dict[str, float]) -> dict[str, float]:
    """Returns a perplexity for every cross-entropy, "small/perplexity" for "small/cross_entropy"."""
    return {
        name.removesuffix("cross_entropy") + "perplexity": math.exp(value) if value < 700 else math.inf
        for name, value in metrics.items()
        if name.rpartition("/")[2] == "cross_entropy"
    }
