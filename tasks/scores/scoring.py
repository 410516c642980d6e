"""Scores of models with a scalar head: one per text, such as a reward, or one per token, such as a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.logits.taps import base_model, tapped_forward
from tasks.text.language import accepted_arguments
from trainer import Batch, ConfigError, ModelHandle

HEAD = "score"  # transformers' name of a decoder's head that gives a score at every token


def sequence_scores(model: ModelHandle, batch: Batch) -> Tensor:
    """Returns one score per row, (B,) in float32: that of its last real token, by the attention mask.

    transformers' own choice of that token compares with the pad token, and takes one before the end where the end token
    pads too. An encoder, which scores a whole text at once, is taken as it is.
    """
    inputs = _inputs(model, batch)
    if HEAD not in dict(base_model(model.module).named_children()):
        return _of_texts(model, _logits(model(**inputs)), batch)
    _, states = tapped_forward(model, inputs, [HEAD])
    scores = _of_tokens(model, states[HEAD], batch)
    return scores.gather(1, last_tokens(batch).unsqueeze(1)).squeeze(1)


def token_scores(model: ModelHandle, batch: Batch) -> Tensor:
    """Returns one score per token, (B, T) in float32: that of the text up to and with it."""
    return _of_tokens(model, _logits(model(**_inputs(model, batch))), batch)


def last_tokens(batch: Batch) -> Tensor:
    """Returns the column of each row's last real token, (B,), whichever side is padded."""
    tokens, attended = batch["input_ids"], batch.get("attention_mask")
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return columns.amax(1) if attended is None else (columns * (attended != 0)).amax(1)


def _inputs(model: ModelHandle, batch: Batch) -> dict[str, Any]:
    inputs: dict[str, Any] = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
    optional: dict[str, Any] = {"use_cache": False}
    if "attention_mask" in batch and bool((batch["attention_mask"][:, 0] == 0).any()):
        # From the first real token on: left padding must not move a model with absolute positions.
        optional["position_ids"] = (batch["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    accepted = accepted_arguments(model.module)
    return {**inputs, **{key: value for key, value in optional.items() if key in accepted}}


def _logits(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _of_texts(model: ModelHandle, scores: Tensor, batch: Batch) -> Tensor:
    if scores.ndim == 2 and scores.shape[1] == 1:
        scores = scores[:, 0]
    _refuse_other(model, scores, batch["input_ids"].shape[:1], wanted="one score per text", build="reward_model")
    return scores.float()


def _of_tokens(model: ModelHandle, scores: Tensor, batch: Batch) -> Tensor:
    if scores.ndim == 3 and scores.shape[2] == 1:
        scores = scores[:, :, 0]
    _refuse_other(model, scores, batch["input_ids"].shape, wanted="one score per token", build="critic")
    return scores.float()


def _refuse_other(model: ModelHandle, scores: Tensor, shape: torch.Size, *, wanted: str, build: str) -> None:
    if scores.shape != shape:
        raise ConfigError(
            f"models.{model.name} gives scores of shape {tuple(scores.shape)} for tokens of {tuple(shape)}; {wanted} "
            f"is needed: model@models.{model.name}.build={build}"
        )
