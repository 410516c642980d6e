"""Pairs of answers inside tasks: both sides of a batch as one batch of a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer import IGNORED, Batch

SIDES = ("chosen", "rejected")
BATCH_FIELDS = tuple(f"{side}_{part}" for side in SIDES for part in ("input_ids", "labels", "attention_mask"))


def both_sides(batch: Batch) -> Batch:
    """Returns the 2B answers of B pairs, the chosen ones first: `input_ids`, `labels`, `attention_mask`, (2B, T).

    The shorter side gets pads on the right, which are known by the mask and not by their token.
    """
    return {
        part: _stack(batch[f"{SIDES[0]}_{part}"], batch[f"{SIDES[1]}_{part}"], pad=pad)
        for part, pad in (("input_ids", 0), ("labels", IGNORED), ("attention_mask", 0))
    }


def split_sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values of the chosen and of the rejected answers, (B, ...) each of (2B, ...)."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected


def _stack(first: Tensor, second: Tensor, *, pad: int) -> Tensor:
    size = max(first.shape[1], second.shape[1])
    return torch.cat([F.pad(side, (0, size - side.shape[1]), value=pad) for side in (first, second)])
