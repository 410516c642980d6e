"""Rows of several texts each, such as a query and its document: one token sequence per text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config import ConfigError
from trainer.data.files import load_rows
from trainer.data.rows import Row
from trainer.data.split import split_rows
from trainer.data.tokenizers import load_tokenizer
from trainer.task import Batch

PARTS = ("train", "validation", "all")


class TextFields(Dataset[dict[str, Tensor]]):
    """The examples of a file, one item per row: "<field>_input_ids", (T,), for every field.

    Args:
        source: A file, a hub name or embedded:<asset>.
        fields: The keys of a row that are read.
        tokenizer: A folder, a hub name or embedded:<asset>.
        part: "train" or "validation": the two sides of one split by the seed; or "all".
        max_length: Tokens; longer texts are cut.
    """

    def __init__(
        self,
        source: str,
        *,
        fields: list[str],
        tokenizer: str,
        part: str = "all",
        validation_fraction: float = 0.1,
        max_length: int = 64,
        seed: int = 0,
    ) -> None:
        if part not in PARTS:
            raise ConfigError(f"part={part}: must be one of {', '.join(PARTS)}")
        if not 0 < validation_fraction < 1:
            raise ConfigError(f"validation_fraction={validation_fraction}: must lie between 0 and 1")
        if not max_length >= 1:  # the tokenizer takes 0 for no limit
            raise ConfigError(f"max_length={max_length}: must be at least 1")
        if not fields:
            raise ConfigError("fields is empty; name the keys of a row that are read")
        rows = load_rows(source)
        _check_fields(rows, fields, source)
        if part != "all":
            rows = split_rows(rows, fraction=validation_fraction, seed=seed)[part == "validation"]
        encode = load_tokenizer(tokenizer)
        self._columns = {
            field: encode([row[field] for row in rows], truncation=True, max_length=max_length)["input_ids"]
            for field in fields
        }
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {f"{field}_input_ids": torch.tensor(column[index]) for field, column in self._columns.items()}


class FieldCollator:
    """Pads each field on the right; "<field>_attention_mask" is 0 on pads.

    Args:
        tokenizer: The one of the examples; its pad token fills up.
    """

    def __init__(self, tokenizer: str) -> None:
        self.pad_token_id = int(load_tokenizer(tokenizer).pad_token_id)

    def __call__(self, items: list[dict[str, Tensor]]) -> Batch:
        batch: Batch = {}
        for key in items[0]:
            rows = [item[key] for item in items]
            masks = [torch.ones_like(row) for row in rows]
            pad = torch.nn.utils.rnn.pad_sequence
            batch[key] = pad(rows, batch_first=True, padding_value=self.pad_token_id)
            batch[key.replace("_input_ids", "_attention_mask")] = pad(masks, batch_first=True)
        return batch


def _check_fields(rows: list[Row], fields: list[str], source: str) -> None:
    for index, row in enumerate(rows):
        for field in fields:
            value: Any = row.get(field)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(
                    f"{source}, row {index + 1}: '{field}' is {value!r}; it must be text (the row has {', '.join(row)})"
                )
