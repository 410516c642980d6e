"""Prompts taken out of a batch: token ids, texts, columns, copies."""

from __future__ import annotations

from typing import Any

import torch

from tasks.text.prompts import columns_of, longest_prompt, prompts_of, repeat, texts_of
from tasks.text.sequences import exchanges_of
from trainer import TrainingData

BATCH = {
    "prompt_input_ids": torch.tensor([[5, 6, 0], [7, 0, 8]]),
    "prompt_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "columns": {
        "prompt": ["Why?", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]],
        "answer": ["a", None],
    },
}


def test_prompts_are_told_from_pads_by_the_mask_alone() -> None:
    assert prompts_of(BATCH) == [[5, 6], [7, 0, 8]]


def test_a_prompts_text_is_what_is_asked_last() -> None:
    assert texts_of(BATCH) == ["Why?", "How?"]
    assert columns_of(BATCH) == {"answer": ["a", None]}


def test_copies_stand_side_by_side() -> None:
    assert repeat(["a", "b"], 3) == ["a", "a", "a", "b", "b", "b"]


def test_the_longest_prompt_is_that_of_all_sets_before_the_last_answer() -> None:
    prompts: Any = [{"prompt_input_ids": torch.arange(size)} for size in (3, 7)]
    labels = [[-100, 5, -100, -100, 6, 7, -100], [4, 5, 6], [-100] * 9]
    rows: Any = [{"labels": torch.tensor(row)} for row in labels]
    other: Any = [torch.zeros(20)]

    assert longest_prompt({"": TrainingData(train=prompts, validation=prompts[:1])}) == 7
    assert longest_prompt({"": TrainingData(train=prompts, validation=prompts[:1])}, trains=False) == 3
    assert longest_prompt({"": TrainingData(train=rows), "own": TrainingData(train=other)}) == 4
    assert [len(one.prompt) for one in exchanges_of({"input_ids": rows[0]["labels"][None], **_batched(rows[0])})] == [4]
    assert longest_prompt({}) == 1


def _batched(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"labels": item["labels"][None]}
