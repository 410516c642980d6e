"""Rows of several texts: their split, their tokens, their pads, and what is told of a row that lacks one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from trainer.config import ConfigError
from trainer.data.fields import FieldCollator, TextFields

FIELDS = ["query", "document"]


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of the tests' own, whose end token is its pad token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def pairs(count: int, *, per_document: int = 1) -> list[dict[str, Any]]:
    return [{"query": f"term {index}", "document": f"meaning {index // per_document}"} for index in range(count)]


def texts(data: TextFields, field: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [str(tokenizer.decode(data[index][f"{field}_input_ids"])) for index in range(len(data))]


def test_an_item_has_the_tokens_of_every_field_asked_for(
    tmp_path: Path, folder: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"query": "What is a cat?", "document": "A small animal.", "other": "not read"}]

    data = TextFields(write(tmp_path, rows), fields=FIELDS, tokenizer=folder)

    assert len(data) == 1 and set(data[0]) == {"query_input_ids", "document_input_ids"}
    for field in FIELDS:
        assert data[0][f"{field}_input_ids"].tolist() == tokenizer(rows[0][field])["input_ids"]
        assert data[0][f"{field}_input_ids"].dtype == torch.long


def test_train_and_validation_are_two_sides_of_one_split_without_a_common_document(
    tmp_path: Path, folder: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = write(tmp_path, pairs(60, per_document=3))

    train, validation, everything = (
        TextFields(source, fields=FIELDS, tokenizer=folder, part=part, validation_fraction=0.2, seed=4)
        for part in ("train", "validation", "all")
    )

    assert (len(train), len(validation), len(everything)) == (48, 12, 60)
    sides = [texts(side, "query", tokenizer) for side in (train, validation)]
    assert sorted(sides[0] + sides[1]) == sorted(texts(everything, "query", tokenizer))
    assert not set(texts(train, "document", tokenizer)) & set(texts(validation, "document", tokenizer))


def test_the_split_is_the_seeds(tmp_path: Path, folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write(tmp_path, pairs(60))

    def held_out(seed: int) -> list[str]:
        data = TextFields(source, fields=FIELDS, tokenizer=folder, part="validation", seed=seed)
        return texts(data, "query", tokenizer)

    assert held_out(1) == held_out(1) != held_out(2)


def test_by_default_every_row_is_there_in_its_order(
    tmp_path: Path, folder: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = pairs(5) + pairs(1)  # one twice

    data = TextFields(write(tmp_path, rows), fields=["query"], tokenizer=folder)

    assert texts(data, "query", tokenizer) == [row["query"] for row in rows]


def test_longer_texts_are_cut_at_the_end_and_shorter_ones_are_left(
    tmp_path: Path, folder: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"query": "one two three four five six seven", "document": "a"}]
    whole = tokenizer(rows[0]["query"])["input_ids"]

    data = TextFields(write(tmp_path, rows), fields=FIELDS, tokenizer=folder, max_length=4)

    assert len(whole) > 4 and data[0]["query_input_ids"].tolist() == whole[:4]
    assert data[0]["document_input_ids"].tolist() == tokenizer("a")["input_ids"]


def test_the_mask_is_0_on_pads_and_1_on_a_real_token_of_the_same_id(folder: str) -> None:
    """The tokenizer pads with its end token, which may stand in a text."""
    collate = FieldCollator(folder)
    pad = collate.pad_token_id

    batch = collate(
        [
            {"query_input_ids": torch.tensor([5, 6, pad]), "document_input_ids": torch.tensor([7])},
            {"query_input_ids": torch.tensor([8]), "document_input_ids": torch.tensor([9, 10])},
        ]
    )

    assert {name: value.tolist() for name, value in batch.items()} == {
        "query_input_ids": [[5, 6, pad], [8, pad, pad]],
        "query_attention_mask": [[1, 1, 1], [1, 0, 0]],
        "document_input_ids": [[7, pad], [9, 10]],
        "document_attention_mask": [[1, 0], [1, 1]],
    }
    assert all(value.dtype == torch.long for value in batch.values())


@pytest.mark.parametrize("part", ["all", "train"])
@pytest.mark.parametrize("value", [None, "  ", 3])
def test_a_row_without_a_text_is_named_as_it_stands_in_the_file_with_its_keys(
    tmp_path: Path, folder: str, value: Any, part: str
) -> None:
    rows = pairs(40)
    rows[2] = {"query": "term", "definition": "meaning"} | ({} if value is None else {"document": value})
    source = write(tmp_path, rows)

    with pytest.raises(ConfigError) as caught:
        TextFields(source, fields=FIELDS, tokenizer=folder, part=part, validation_fraction=0.5)

    message = str(caught.value)
    assert f"{source}, row 3: 'document' is {value!r}; it must be text" in message
    assert all(key in message.partition("the row has ")[2] for key in ("query", "definition"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": "test"}, "part=test: must be one of train, validation, all"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0\.0: must lie between 0 and 1"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0: must lie between 0 and 1"),
        ({"max_length": 0}, "max_length=0: must be at least 1"),
        ({"max_length": -1}, "max_length=-1: must be at least 1"),
        ({"fields": []}, "fields is empty"),
    ],
)
def test_impossible_settings_are_refused_with_the_rule(
    tmp_path: Path, folder: str, settings: dict[str, Any], message: str
) -> None:
    source = write(tmp_path, pairs(4))
    with pytest.raises(ConfigError, match=message):
        TextFields(source, **{"fields": FIELDS, "tokenizer": folder, **settings})


def test_a_fraction_too_small_for_one_row_still_holds_one_out(tmp_path: Path, folder: str) -> None:
    source = write(tmp_path, pairs(10))

    data = TextFields(source, fields=FIELDS, tokenizer=folder, part="validation", validation_fraction=0.001)

    assert len(data) == 1
