"""Batches of prompts: as token ids, as text, and each repeated for several completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trainer import IGNORED, Batch, TrainingData

PROMPT_FIELDS = ("prompt_input_ids", "prompt_attention_mask", "columns")

T = TypeVar("T")


def prompts_of(batch: Batch) -> list[list[int]]:
    """Returns the token ids of each prompt, without pads."""
    tokens, attended = batch["prompt_input_ids"], batch["prompt_attention_mask"]
    return [row[kept].tolist() for row, kept in zip(tokens, attended != 0, strict=True)]


def longest_prompt(sources: Mapping[str, TrainingData], *, trains: bool = True) -> int:
    """Returns the tokens of the longest prompt of a run's data, at least 1.

    Args:
        trains: Whether those of the training examples are answered too.
    """
    datasets = [dataset for one in sources.values() for part, dataset in one.parts.items() if trains or part != "train"]
    return max((_prompt_length(item) for dataset in datasets for item in _items(dataset)), default=1)


def _items(dataset: Any) -> Iterator[Mapping[str, Any]]:
    # A user's own items may be anything, from which only a collate makes prompts.
    items = (dataset[index] for index in range(len(dataset)))
    return (item for item in items if isinstance(item, Mapping) and ("prompt_input_ids" in item or "labels" in item))


def _prompt_length(item: Mapping[str, Any]) -> int:
    """Returns the tokens of a prompt, or of what stands before a row's last answer, as `exchanges_of` has it."""
    if "prompt_input_ids" in item:
        return len(item["prompt_input_ids"])
    has_label = item["labels"] != IGNORED
    has_label[0] = False  # nothing predicts the first token
    answered = has_label.nonzero().flatten()
    if not len(answered):
        return 1
    before = (~has_label[: int(answered[-1])]).nonzero().flatten()
    return int(before[-1]) + 1


def texts_of(batch: Batch) -> list[str]:
    """Returns what each prompt asks: its text, or of messages what the last one says."""
    return [said(prompt) for prompt in batch["columns"]["prompt"]]


def said(prompt: str | list[dict[str, str]]) -> str:
    """Returns the text of a prompt, or of messages the last one's."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def columns_of(batch: Batch) -> dict[str, list[Any]]:
    """Returns the other columns of the rows, as reward functions take them."""
    return {name: list(values) for name, values in batch["columns"].items() if name != "prompt"}


def repeat(values: Sequence[T], count: int) -> list[T]:
    """Returns each value so many times, its copies side by side."""
    return [value for value in values for _ in range(count)]
