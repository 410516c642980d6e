"""From examples to one rectangular batch, and from a batch to what a causal language model is called with."""

from typing import Any, Literal

import torch
from torch import Tensor

from trainer.task import IGNORED, Batch


class PaddingCollator:
    """Pads to the longest example: labels with -100, `attention_mask` 0 on pads, by length and never by token id.

    Packed examples (those with `position_ids`) get no `attention_mask`: transformers keeps attention inside a document
    by the restarts of `position_ids` alone, and only where no mask is given. A run of pads counts as one more document.
    Where rows have a source, `source` holds that of each token, -1 on pads.
    """

    def __init__(self, pad_token_id: int, *, padding_side: Literal["left", "right"] = "right") -> None:
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side

    def __call__(self, items: list[dict[str, Tensor]]) -> Batch:
        batch = {
            "input_ids": self._pad([item["input_ids"] for item in items], self.pad_token_id),
            "labels": self._pad([item["labels"] for item in items], IGNORED),
        }
        if "source" in items[0]:
            batch["source"] = self._pad([item["source"] for item in items], -1)
        if any("position_ids" in item for item in items):
            positions = [item["position_ids"] for item in items]
            return batch | {"position_ids": self._pad(positions, None)}
        batch["attention_mask"] = self._pad([torch.ones_like(item["input_ids"]) for item in items], 0)
        if self.padding_side == "left":
            # Absolute positions (GPT-2) would otherwise count the pads.
            batch["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        return batch

    def _pad(self, rows: list[Tensor], value: int | None) -> Tensor:
        """Returns (batch, longest); a value of None counts the pads from 0."""
        longest = max(len(row) for row in rows)
        padded = []
        for row in rows:
            pads = torch.arange(longest - len(row)) if value is None else row.new_full((longest - len(row),), value)
            padded.append(torch.cat([pads, row] if self.padding_side == "left" else [row, pads]))
        return torch.stack(padded)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Returns the keyword arguments of a causal language model's forward, without labels.

    A cache has no use in training, and with one transformers ignores the document borders of a packed block, silently.
    """
    names = ("input_ids", "attention_mask", "position_ids")
    return {name: batch[name] for name in names if name in batch} | {"use_cache": False}
