"""Prompts that a model is to answer, with the other columns of their rows, such as the right answer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.data.rows import Row, find_message_problem
from trainer.data.text import render_messages
from trainer.task import Batch

log = logging.getLogger(__name__)

TOO_LONG = ("refuse", "cut", "drop")


class PromptRows:
    """Reads rows with a `prompt`, text or messages, and any other columns.

    Args:
        too_long: What becomes of prompts of more than block_size tokens: "refuse"; "cut": their last ones stay; "drop".
    """

    noun = "prompts"

    def __init__(self, *, too_long: str = "refuse") -> None:
        if too_long not in TOO_LONG:
            raise ConfigError(f"data.rows.too_long={too_long}: must be one of {', '.join(TOO_LONG)}")
        self.too_long = too_long

    def prepare(self, row: Row) -> Row:
        """Returns the row as it is, whose prompt asks something."""
        prompt = row.get("prompt")
        if isinstance(prompt, list):
            prompt = [
                {k: v for k, v in one.items() if v is not None} if isinstance(one, dict) else one for one in prompt
            ]
            problem = find_message_problem(prompt, name="prompt")
            if problem:
                raise ConfigError(problem)
            if prompt[-1]["role"] == "assistant":
                raise ConfigError(
                    "the messages of 'prompt' end with the assistant's; the last one must be the one to answer"
                )
        elif not isinstance(prompt, str):
            raise ConfigError(f"expected text or messages in 'prompt', found {prompt!r} (the row has {', '.join(row)})")
        said = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        if not said.strip():
            raise ConfigError(f"'prompt' is {prompt!r}; it must say something")
        return {**row, "prompt": prompt}

    def build(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, block_size: int) -> PromptDataset:
        """Returns the prompts as token ids, each with its row."""
        encoded = encode_prompts([row["prompt"] for row in rows], tokenizer)
        kept = _fit(encoded, block_size=block_size, too_long=self.too_long)
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [{name: rows[index].get(name) for name in names} for index, _ in kept]
        return PromptDataset([ids for _, ids in kept], columns)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> PromptCollator:
        return PromptCollator(int(tokenizer.pad_token_id))


class PromptDataset(Dataset[dict[str, Any]]):
    """Prompts: an item holds `prompt_input_ids`, (T,), and `columns`, its row; what it lacks is None."""

    def __init__(self, ids: list[list[int]], rows: list[Row]) -> None:
        self.ids, self.rows = ids, rows

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt_input_ids": torch.tensor(self.ids[index]), "columns": self.rows[index]}


class PromptCollator:
    """Pads the prompts on the right, `prompt_attention_mask` being 0 on pads; `columns` is a list per column."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: list[dict[str, Any]]) -> Batch:
        rows: list[Tensor] = [item["prompt_input_ids"] for item in items]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "prompt_input_ids": pad(rows, batch_first=True, padding_value=self.pad_token_id),
            "prompt_attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
            "columns": {name: [item["columns"][name] for item in items] for name in items[0]["columns"]},
        }


def encode_prompts(prompts: list[str | list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Returns the token ids of each prompt, ready for an answer to follow."""
    is_templated = tokenizer.chat_template is not None
    texts = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            texts.append(render_messages(prompt, tokenizer))
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error
    # A template has the special tokens. verbose: what is too long is reported by the caller.
    encoded = tokenizer(texts, add_special_tokens=not is_templated, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    # Some tokenizers close every text, but these go on.
    return [ids[:-1] if not is_templated and len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


def _fit(encoded: list[list[int]], *, block_size: int, too_long: str) -> list[tuple[int, list[int]]]:
    """Returns the place and the tokens of each prompt that stays."""
    longer = [ids for ids in encoded if len(ids) > block_size]
    if not longer:
        return list(enumerate(encoded))
    told = f"{len(longer)} of {len(encoded)} prompts have more than data.block_size={block_size} tokens"
    if too_long == "refuse" or (too_long == "drop" and len(longer) == len(encoded)):
        longest = max(map(len, longer))
        raise ConfigError(f"{told}, up to {longest}; raise it, or set data.rows.too_long to cut or drop")
    if too_long == "drop":
        log.warning("%s and are dropped", told)
        return [(index, ids) for index, ids in enumerate(encoded) if len(ids) <= block_size]
    log.warning("%s and are cut to their last ones", told)
    return [(index, ids[-block_size:]) for index, ids in enumerate(encoded)]
