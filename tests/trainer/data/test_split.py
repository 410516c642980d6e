"""Duplicates go, and no document is on both sides of a split."""

import logging

import pytest

from trainer.config import ConfigError
from trainer.data import deduplicate, load_rows, split_rows


def pairs(*prompts):
    return [{"prompt": prompt, "completion": f"answer {index}"} for index, prompt in enumerate(prompts)]


def test_exact_duplicates_are_dropped_and_counted(caplog):
    rows = [{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "a"}]

    with caplog.at_level(logging.INFO):
        kept = deduplicate(rows)

    assert kept == [{"text": "a"}, {"text": "b"}]
    assert "dropped 2 duplicates of 4 rows" in caplog.text


def test_repeated_pairs_cannot_leak_into_validation():
    rows = [{"prompt": f"q{index % 10}", "completion": f"a{index % 10}"} for index in range(1050)]

    train, validation = split_rows(rows, fraction=0.2, seed=0)

    assert (len(train), len(validation)) == (8, 2)


def test_no_document_is_on_both_sides():
    rows = [{"text": f"part {index}", "document": index // 5} for index in range(100)]

    train, validation = split_rows(rows, fraction=0.1, seed=3)

    assert len(validation) == 10
    assert not {row["document"] for row in train} & {row["document"] for row in validation}
    assert sorted(row["text"] for row in train + validation) == sorted(row["text"] for row in rows)


def test_without_a_document_column_the_same_question_is_one_document():
    rows = pairs(*(f"Question {index // 2}" if index % 2 else f"  question  {index // 2}" for index in range(40)))
    chats = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]

    for examples in (rows, chats):
        train, validation = split_rows(examples, fraction=0.25, seed=0)
        questions = [
            {str(row).casefold().split("question")[1].split("'")[0].split()[0] for row in side}
            for side in (train, validation)
        ]
        assert len(validation) == 10
        assert not questions[0] & questions[1]


def test_split_depends_on_the_seed_alone():
    rows = pairs(*(f"q{index}" for index in range(100)))

    first, again, other = (split_rows(rows, fraction=0.1, seed=seed)[1] for seed in (0, 0, 1))

    assert first == again != other


def test_split_of_the_embedded_text_has_the_asked_size():
    train, validation = split_rows(load_rows("embedded:chatterbot-english"), fraction=0.1, seed=0)

    assert (len(train), len(validation)) == (674, 75)


def test_one_document_is_never_split():
    rows = [{"text": f"part {index}", "document": "book"} for index in range(10)]

    with pytest.raises(ConfigError, match="at least 2 are needed"):
        split_rows(rows, fraction=0.5, seed=0)
