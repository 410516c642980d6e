"""Sentence embeddings inside tasks: pooling, how well they find documents, and how alike two spaces are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.logits.taps import tapped_forward
from trainer import Batch, ConfigError, ModelHandle

ROWS_AT_ONCE = 1024
SAME = 1e-6  # similarities this near are equal: rounding in float32 must not rank equal vectors


def run_encoder(
    model: ModelHandle, batch: Batch, field: str, *, paths: Sequence[str] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """Returns an encoder's output for one field of a batch, which has a state per token, and those of its modules.

    Args:
        paths: Of the modules, (B, T, D) each; as in `find_module`.
    """
    inputs = {name: batch[f"{field}_{name}"] for name in ("input_ids", "attention_mask")}
    output, states = tapped_forward(model, inputs, paths) if paths else (model(**inputs), {})
    if not isinstance(output, Tensor) and getattr(output, "last_hidden_state", None) is None:
        raise ConfigError(
            f"models.{model.name} gives {type(output).__name__}, without a state per token; it must be an encoder: "
            f"model@models.{model.name}.build=encoder"
        )
    return output, states


def sentence_vectors(output: Any, mask: Tensor) -> Tensor:
    """Returns the mean over each sentence's attended tokens as a unit vector, (B, D) in float32."""
    states = output if isinstance(output, Tensor) else output.last_hidden_state  # (B, T, D)
    weights = mask.unsqueeze(-1).to(torch.float32)
    mean = (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
    return F.normalize(mean, dim=-1)


def retrieval_ranks(queries: Tensor, documents: Tensor) -> Tensor:
    """Returns the place of each query's own document among all documents, from 1 on, (N,), of unit vectors (N, D).

    A document that is as near stands before the own one, and so does every one where a similarity is no number:
    encoders that tell nothing apart find nothing.
    """
    own = (queries * documents).sum(1, keepdim=True)
    # in parts: of many pairs, all similarities at once would not fit
    parts = zip(torch.split(queries, ROWS_AT_ONCE), torch.split(own, ROWS_AT_ONCE), strict=True)
    # not "before": what is no number is not behind either, and the own one is not behind itself
    return torch.cat([(~(part @ documents.T < mine - SAME)).sum(1) for part, mine in parts])


def pair_similarities(vectors: Tensor) -> Tensor:
    """Returns the cosines of all pairs i < j of unit vectors, (N(N-1)/2,)."""
    first, second = torch.triu_indices(len(vectors), len(vectors), 1, device=vectors.device)
    return (vectors @ vectors.T)[first, second]


def pearson(first: Tensor, second: Tensor) -> float:
    """Returns the correlation of two lists of numbers, computed in float64; 0 where one of them is constant."""
    mine, theirs = (values.double() - values.double().mean() for values in (first, second))
    norms = mine.norm() * theirs.norm()
    return float((mine @ theirs) / norms) if norms > 0 else 0.0


def spearman(first: Tensor, second: Tensor) -> float:
    """Returns the correlation of their ranks; equal numbers share the mean of theirs."""
    return pearson(_ranks(first), _ranks(second))


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks: Tensor = (last - (counts - 1) / 2)[places]
    return ranks
