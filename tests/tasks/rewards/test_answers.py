"""Answers to a batch of prompts: each beside its own row's prompt and columns."""

from __future__ import annotations

import torch

from tasks.rewards import Answers
from tasks.text.sequences import Exchange
from tests.tasks.tiny_tokenizers import make_tokenizer


def test_each_answer_stands_beside_its_own_prompt_and_columns() -> None:
    tokenizer = make_tokenizer()
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how"}]
    batch = {"columns": {"prompt": ["why", asked], "level": [1, 2]}, "prompt_input_ids": torch.zeros(2, 1)}
    said = ["so", "no<end>", "thus", ""]
    exchanges = [Exchange(prompt=[2], answer=tokenizer(text)["input_ids"], column=1) for text in said]

    answers = Answers.of(batch, exchanges, samples=2, tokenizer=tokenizer)

    assert len(answers) == 4 and answers.exchanges == exchanges
    assert answers.prompts == ["why", "why", "how", "how"]
    assert answers.completions == ["so", "no", "thus", ""]  # no special tokens
    assert answers.raw_prompts == ["why", "why", asked, asked] and answers.columns == {"level": [1, 1, 2, 2]}
