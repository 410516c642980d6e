"""Causal language models inside tasks: the positions that count, and each model's logits there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer import IGNORED, Batch, ModelHandle

if TYPE_CHECKING:
    pass


BATCH_FIELDS = ("input_ids", "labels")


def real_tokens(batch: Batch) -> Tensor:
    """Returns which tokens are no padding, (B, T) bool; of rows without attention mask or documents all.

    Packed rows have no attention mask, and their padding is one more document, the first or last of its row: one token
    repeated, without a label.
    """
    attended, tokens, labels = batch.get("attention_mask"), batch["input_ids"], batch["labels"]
    if attended is not None and attended.ndim == 2:
        is_real: Tensor = attended != 0
        return is_real
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    if "position_ids" in batch:
        documents = _documents(batch)
        for edge in (slice(0, 1), slice(-1, None)):
            is_edge = documents == documents[:, edge]
            is_like_padding = (tokens == tokens[:, edge]) & (labels == IGNORED)
            is_real = is_real & ~(is_edge & (is_like_padding | ~is_edge).all(-1, keepdim=True))
    return is_real


def all_mask(batch: Batch) -> Tensor:
    """Returns which positions hold a real token whose next token is real and of the same document, (B, T-1) bool.

    Packed documents are told apart by `position_ids`.
    """
    is_real = real_tokens(batch)
    mask: Tensor = is_real[:, :-1] & is_real[:, 1:]
    if "position_ids" in batch:
        positions = batch["position_ids"]
        mask = mask & (positions[:, 1:] == positions[:, :-1] + 1)
    return mask


def completion_mask(batch: Batch) -> Tensor:
    """Returns those positions of `all_mask` whose next token has a label, (B, T-1) bool."""
    has_label: Tensor = batch["labels"][:, 1:] != IGNORED
    return all_mask(batch) & has_label


def prompt_mask(batch: Batch) -> Tensor:
    """Returns those positions of `all_mask` whose next token has no label, (B, T-1) bool."""
    has_none: Tensor = batch["labels"][:, 1:] == IGNORED
    return all_mask(batch) & has_none


MASKS: dict[str, Callable[[Batch], Tensor]] = {"completion": completion_mask, "prompt": prompt_mask, "all": all_mask}


def attention_pairs(batch: Batch) -> Tensor:
    """Returns which positions each position may attend to: real ones of its document, up to itself, (B, T, T) bool."""
    tokens, attended = batch["input_ids"], batch.get("attention_mask")
    size = tokens.shape[1]
    pairs = torch.ones(size, size, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
    if attended is not None and attended.ndim == 2:
        pairs = pairs & (attended != 0)[:, None, :]
    elif "position_ids" in batch:
        documents = _documents(batch)
        pairs = pairs & (documents[:, :, None] == documents[:, None, :])
    return pairs


def _documents(batch: Batch) -> Tensor:
    """Returns the number of each token's document within its packed row, (B, T)."""
    numbers: Tensor = (batch["position_ids"] == 0).cumsum(-1)  # each restart begins another one
    return numbers


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
    output = model(**model_arguments(model, batch, counted))
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return select_rows(logits, counted)[:, :vocabulary].float()


def model_arguments(model: ModelHandle, batch: Batch, counted: Tensor) -> dict[str, Any]:
    """Returns what a model's forward is given, so that its head runs at no more columns than have a counted position.

    Args:
        counted: (B, T-1) bool.
    """
    given: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
    optional: dict[str, Any] = {"use_cache": False, "logits_to_keep": _columns(counted)}
    if "position_ids" not in batch and "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        # From the first real token on: left padding must not move a model with absolute positions.
        optional["position_ids"] = (batch["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    accepted = accepted_arguments(model.module)
    return {**given, **{key: value for key, value in optional.items() if key in accepted}}


def select_rows(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the counted positions, (N, D), of what the head is given or returns.

    Args:
        values: (B, K, D) of the K columns of `model_arguments`, or (B, T, D) of a model that knows no columns.
        counted: (B, T-1) bool.
    """
    columns = _columns(counted)
    if values.shape[1] == counted.shape[1] + 1:
        values = values[:, columns]
    rows = counted[:, columns].flatten().nonzero().squeeze(-1)
    return values.flatten(0, 1).index_select(0, rows)


def _columns(counted: Tensor) -> Tensor:
    columns = counted.any(0).nonzero().squeeze(-1)
    # Of an empty batch one: it must run the same modules as the other ranks'.
    return columns if len(columns) else columns.new_zeros(1)


def accepted_arguments(module: nn.Module) -> set[str]:
    """Returns which optional arguments the module's forward takes, by name or through **kwargs."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in ("use_cache", "logits_to_keep", "position_ids") if takes_any or name in parameters}


def perplexities(metrics: dict[str, float]) -> dict[str, float]:
    """Returns a perplexity for every cross-entropy, "small/perplexity" for "small/cross_entropy"."""
    return {
        name.removesuffix("cross_entropy") + "perplexity": math.exp(value) if value < 700 else math.inf
        for name, value in metrics.items()
        if name.rpartition("/")[2] == "cross_entropy"
    }
