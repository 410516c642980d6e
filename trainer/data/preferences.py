"""Pairs of answers to one prompt, of which one is preferred."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.data.example import Example
from trainer.data.rows import Message, Row, find_message_problem
from trainer.data.text import tokenize_answers
from trainer.task import IGNORED, Batch

log = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")
FORM = 'expected {"prompt", "chosen", "rejected"[, "margin"]}'


class PreferenceRows:
    """Reads rows {"prompt", "chosen", "rejected"[, "margin"]}; texts, or messages.

    Messages that begin with an assistant's turn continue the prompt. Others are whole conversations, and what both
    begin with is the prompt.
    """

    noun = "pairs"

    def prepare(self, row: Row) -> Row:
        """Returns the row with its prompt apart from both answers."""
        missing = [name for name in SIDES if name not in row]
        if missing:
            raise ConfigError(f"{FORM}, found {', '.join(row) or 'nothing'}")
        row = {**row, **{name: _without_gaps(row[name]) for name in ("prompt", *SIDES) if name in row}}
        for name in SIDES:
            _refuse(_find_part_problem(name, row[name]))
        chosen, rejected = (row[name] for name in SIDES)
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise ConfigError("'chosen' and 'rejected' must both be text, or both be messages")
        if chosen == rejected:
            raise ConfigError("'chosen' and 'rejected' are equal, so that neither is preferred; drop the row")
        if not isinstance(chosen, str) and not (_is_answer(chosen) and _is_answer(rejected)):
            row = _apart(row)
        _refuse(_find_prompt_problem(row))
        _refuse(_find_margin_problem(row))
        for name in SIDES:
            if not isinstance(row[name], str) and not any(turn["role"] == "assistant" for turn in row[name]):
                raise ConfigError(f"'{name}' holds no message of the assistant after the prompt")
        return row

    def build(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, block_size: int) -> PreferenceDataset:
        """Returns the pairs, each side of at most block_size tokens.

        Where a side is longer, both prompts lose as many tokens on the left, after a begin token. A pair without a
        prompt token left is dropped: an answer that is cut would be judged by what is not its end.
        """
        with_margin = [index for index, row in enumerate(rows) if "margin" in row]
        if with_margin and len(with_margin) < len(rows):
            raise ConfigError(
                f"{len(with_margin)} of {len(rows)} rows have a 'margin'; give one to every row (0 for none) or to none"
            )
        sides = [tokenize_answers([(row["prompt"], row[name]) for row in rows], tokenizer) for name in SIDES]
        pairs: list[Pair] = []
        num_cut = num_equal = 0
        for row, chosen, rejected in zip(rows, *sides, strict=True):
            if np.array_equal(chosen.input_ids, rejected.input_ids):
                num_equal += 1
                continue
            excess = max(0, len(chosen) - block_size, len(rejected) - block_size)
            cut = [_cut_prompt(side, excess, begin=tokenizer.bos_token_id) for side in (chosen, rejected)]
            if cut[0] is None or cut[1] is None:
                continue
            num_cut += excess > 0
            pairs.append(Pair(chosen=cut[0], rejected=cut[1], margin=row.get("margin")))
        _report(len(rows), len(pairs), num_cut=num_cut, num_equal=num_equal, block_size=block_size)
        return PreferenceDataset(pairs)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> PreferenceCollator:
        return PreferenceCollator(int(tokenizer.pad_token_id))


@dataclass(kw_only=True)
class Pair:
    """Two token sequences that begin with the same prompt; labels are those of the answers."""

    chosen: Example
    rejected: Example
    margin: float | None = None


class PreferenceDataset(Dataset[dict[str, Tensor]]):
    """Pairs as tensors: `<side>_input_ids` and `<side>_labels`, (T,), of "chosen" and "rejected"; `margin`, ()."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = list(pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = self.pairs[index]
        item: dict[str, Tensor] = {}
        for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            item[f"{name}_input_ids"] = torch.from_numpy(side.input_ids.astype(np.int64))
            item[f"{name}_labels"] = torch.from_numpy(side.labels.astype(np.int64))
        if pair.margin is not None:
            item["margin"] = torch.tensor(pair.margin, dtype=torch.float32)
        return item


class PreferenceCollator:
    """Pads each side on the right, labels with -100; `<side>_attention_mask` is 0 on pads, by length."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: list[dict[str, Tensor]]) -> Batch:
        batch: Batch = {}
        pad = torch.nn.utils.rnn.pad_sequence
        for name in SIDES:
            tokens = [item[f"{name}_input_ids"] for item in items]
            labels = [item[f"{name}_labels"] for item in items]
            batch[f"{name}_input_ids"] = pad(tokens, batch_first=True, padding_value=self.pad_token_id)
            batch[f"{name}_labels"] = pad(labels, batch_first=True, padding_value=IGNORED)
            batch[f"{name}_attention_mask"] = pad([torch.ones_like(row) for row in tokens], batch_first=True)
        if "margin" in items[0]:
            batch["margin"] = torch.stack([item["margin"] for item in items])
        return batch


def _without_gaps(value: Any) -> Any:
    """Returns messages without keys that are None: a table gives every message every key of any message."""
    if not isinstance(value, list):
        return value
    return [
        {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else message
        for message in value
    ]


def _find_part_problem(name: str, value: Any) -> str | None:
    if isinstance(value, str):
        return None
    if isinstance(value, list):
        return find_message_problem(value, name=name)
    return f"expected text or a list of messages in '{name}', found {value!r}"


def _find_prompt_problem(row: Row) -> str | None:
    if "prompt" not in row:
        return f"{FORM}, found {', '.join(row)}; two texts need their 'prompt' apart"
    prompt = row["prompt"]
    if isinstance(prompt, str) and not prompt.strip():
        return f"'prompt' is {prompt!r}; it must be text"
    return _find_part_problem("prompt", prompt)


def _find_margin_problem(row: Row) -> str | None:
    margin = row.get("margin", 0)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and bool(np.isfinite(margin))
    return None if is_number else f"'margin' is {margin!r}; it must be a number"


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ConfigError(problem)


def _is_answer(messages: list[Message]) -> bool:
    return bool(messages[0]["role"] == "assistant")


def _apart(row: Row) -> Row:
    """Returns a row of two whole conversations with what they share as its prompt."""
    chosen, rejected = (row[name] for name in SIDES)
    size = next(
        (index for index, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right),
        min(len(chosen), len(rejected)),
    )
    prompt = chosen[:size]
    if not prompt:
        raise ConfigError("the conversations in 'chosen' and 'rejected' do not begin alike, so that there is no prompt")
    if size == min(len(chosen), len(rejected)):
        raise ConfigError("one of the conversations in 'chosen' and 'rejected' is the beginning of the other")
    given = row.get("prompt")
    is_known = (
        given is None
        or given == prompt[: len(given)]
        or (isinstance(given, str) and any(turn["content"] == given for turn in prompt))
    )
    if not is_known:
        raise ConfigError(
            "'chosen' and 'rejected' are whole conversations, and what both begin with is not the 'prompt'; drop "
            "'prompt', or give only the answers"
        )
    return {**row, "prompt": prompt, "chosen": chosen[size:], "rejected": rejected[size:]}


def _cut_prompt(example: Example, excess: int, *, begin: int | None) -> Example | None:
    """Returns the example without its first tokens, but for a begin token; None where no prompt token stays."""
    if excess == 0:
        return example
    first_answer = int(np.flatnonzero(example.labels != IGNORED)[0])
    if first_answer - excess < 1:
        return None
    head = 1 if example.input_ids[0] == begin else 0
    kept = np.r_[:head, head + excess : len(example)]
    return Example(input_ids=example.input_ids[kept], labels=example.labels[kept])


def _report(num_rows: int, num_pairs: int, *, num_cut: int, num_equal: int, block_size: int) -> None:
    num_long = num_rows - num_pairs - num_equal
    if num_pairs == 0:
        raise ConfigError(
            f"none of {num_rows} pairs fits into data.block_size={block_size} tokens with a token of its prompt; "
            "raise it"
        )
    if num_cut:
        log.info("cut the prompts of %d of %d pairs on the left to fit %d tokens", num_cut, num_rows, block_size)
    if num_long:
        log.warning("dropped %d of %d pairs: an answer fills %d tokens", num_long, num_rows, block_size)
    if num_equal:
        log.warning("dropped %d of %d pairs: both sides are the same tokens", num_equal, num_rows)
