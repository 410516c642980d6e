"""Prompts: their tokens, their columns, their split, and what is told of rows that cannot be asked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trainer.config import ConfigError
from trainer.data import load_rows, load_tokenizer, split_rows
from trainer.data.prompts import PromptDataset, PromptRows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def build(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **options: Any) -> PromptDataset:
    block_size = options.pop("block_size", 256)
    reader = PromptRows(**options)
    return reader.build([reader.prepare(row) for row in rows], tokenizer, block_size=block_size)


def test_a_prompt_ends_where_the_assistant_goes_on(tokenizer: PreTrainedTokenizerFast) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    data = build([{"prompt": said, "answer": "Because."}], tokenizer)

    text = tokenizer.decode(data[0]["prompt_input_ids"])
    assert text == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWhy?<|end|>\n<|start|>assistant\n"
    assert data[0]["columns"] == {"prompt": said, "answer": "Because."}


def test_text_is_the_users_and_without_a_template_stands_as_it_is(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [
        tokenizer.decode(build([{"prompt": "Why?"}], each)[0]["prompt_input_ids"])
        for each in (tokenizer, plain_tokenizer)
    ]

    assert texts == ["<|start|>user\nWhy?<|end|>\n<|start|>assistant\n", "Why?"]


def test_messages_without_a_template_are_refused(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="row 1: messages need a chat template"):
        build([{"prompt": [{"role": "user", "content": "Why?"}]}], plain_tokenizer)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "Why?"}, "expected text or messages in 'prompt', found None .the row has question"),
        ({"prompt": "  "}, "'prompt' is '  '; it must say something"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "end with the assist"),
        ({"prompt": [{"role": "user"}]}, "expected a string in 'content'"),
        ({"prompt": []}, "expected a list of messages in 'prompt'"),
        ({"prompt": 3}, "found 3"),
    ],
)
def test_a_row_that_asks_nothing_is_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PromptRows().prepare(row)


def test_a_row_of_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    source = write(tmp_path, [{"prompt": "Why?"}, {"prompt": " "}])

    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2: 'prompt' is ' '"):
        load_rows(source, prepare=PromptRows().prepare)


def test_the_batch_is_padded_by_length_and_has_every_column(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "Why?", "answer": "a"}, {"prompt": "What is a computer?", "level": 3}]
    data = build(rows, tokenizer)

    batch = PromptRows().collator(tokenizer)([data[0], data[1]])

    lengths = [len(item["prompt_input_ids"]) for item in data]
    assert lengths[0] < lengths[1] and batch["prompt_attention_mask"].sum(-1).tolist() == lengths
    assert batch["prompt_input_ids"][0, : lengths[0]].tolist() == data[0]["prompt_input_ids"].tolist()
    assert batch["columns"] == {"prompt": ["Why?", rows[1]["prompt"]], "answer": ["a", None], "level": [None, 3]}


def test_no_prompt_is_on_both_sides_even_with_other_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {index // 2}{' ' * (index % 2)}", "answer": str(index)} for index in range(40)]

    sides = split_rows(load_rows(write(tmp_path, rows), prepare=PromptRows().prepare), fraction=0.2, seed=1)

    train, validation = ({row["prompt"].strip() for row in side} for side in sides)
    assert [len(side) for side in sides] == [32, 8] and not train & validation


def test_long_prompts_are_refused_cut_or_dropped_and_counted(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "Why?"}, {"prompt": "Why? " * 30}]
    short, whole = (item["prompt_input_ids"] for item in build(rows, tokenizer))

    with pytest.raises(
        ConfigError, match=rf"1 of 2 prompts have more than data.block_size=40 tokens, up to {len(whole)}"
    ):
        build(rows, tokenizer, block_size=40)
    with caplog.at_level(logging.WARNING):
        cut = build(rows, tokenizer, block_size=40, too_long="cut")
        dropped = build(rows, tokenizer, block_size=40, too_long="drop")

    assert [len(item["prompt_input_ids"]) for item in cut] == [len(short), 40]
    assert cut[1]["prompt_input_ids"].tolist() == whole[-40:].tolist()
    assert len(dropped) == 1 and dropped.rows[0]["prompt"] == "Why?"
    assert "and are cut" in caplog.text and "and are dropped" in caplog.text
    with pytest.raises(ConfigError, match="2 of 2 prompts"):
        build(rows, tokenizer, block_size=3, too_long="drop")


def test_an_unknown_treatment_is_refused() -> None:
    with pytest.raises(ConfigError, match="too_long=keep: must be one of refuse, cut, drop"):
        PromptRows(too_long="keep")


def test_the_embedded_opposites_stay_on_one_side_with_their_words() -> None:
    rows = load_rows("embedded:wordnet-antonyms", prepare=PromptRows().prepare)

    sides = split_rows(rows, fraction=0.1, seed=0)

    train, held_out = (
        {word for row in side for word in (row["prompt"].split("'")[1], row["answer"])} for side in sides
    )
    assert len(rows) == 328 and len(sides[1]) >= 32 and not train & held_out
    assert len(PromptRows().build(rows, load_tokenizer("embedded:bpe-4k"), block_size=64)) == 328
