"""Pairs of answers: the forms of a row, what is refused, and how a pair that is too long is cut."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.config import ConfigError
from trainer.data import load_rows, load_tokenizer, split_rows
from trainer.data.preferences import PreferenceDataset, PreferenceRows

READER = PreferenceRows()
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind"}
GOOD, BAD = {"role": "assistant", "content": "Hello there"}, {"role": "assistant", "content": "Go"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def build(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, block_size: int = 100
) -> PreferenceDataset:
    return READER.build([READER.prepare(row) for row in rows], tokenizer, block_size=block_size)


def decoded(item: dict[str, Any], side: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Returns the text of a side, and that of its labels, which stand at their own tokens."""
    tokens, labels = item[f"{side}_input_ids"], item[f"{side}_labels"]
    assert torch.equal(labels[labels != -100], tokens[labels != -100])
    return str(tokenizer.decode(tokens)), str(tokenizer.decode(labels[labels != -100]))


PROMPT = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello there", "rejected": "Go"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "Hello there", "rejected": "Go"},
        {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [{**GOOD, "name": None}], "rejected": [BAD]},
    ],
)
def test_every_form_gives_the_same_two_sequences_whose_labels_are_the_answers(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    (item,) = build([row], tokenizer)

    assert decoded(item, "chosen", tokenizer) == (f"{PROMPT}Hello there<|end|>", "Hello there<|end|>")
    assert decoded(item, "rejected", tokenizer) == (f"{PROMPT}Go<|end|>", "Go<|end|>")
    assert set(item) == {f"{side}_{part}" for side in ("chosen", "rejected") for part in ("input_ids", "labels")}


def test_without_a_template_an_answer_follows_its_prompt_and_ends(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    (item,) = build([{"prompt": "Hi:", "chosen": " there", "rejected": ""}], plain_tokenizer)

    assert decoded(item, "chosen", plain_tokenizer) == ("Hi: there<|end|>", " there<|end|>")
    assert decoded(item, "rejected", plain_tokenizer) == ("Hi:<|end|>", "<|end|>"), "an empty answer just ends"


def test_an_earlier_turn_of_the_assistant_belongs_to_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    shared = [SYSTEM, USER, GOOD, {"role": "user", "content": "Bye"}]
    later = [{"role": "user", "content": "More"}, BAD]

    (item,) = build([{"chosen": [*shared, GOOD, *later], "rejected": [*shared, BAD]}], tokenizer)

    text, labels = decoded(item, "chosen", tokenizer)
    assert labels == "Hello there<|end|>Go<|end|>" and "Be kind" in text
    assert decoded(item, "rejected", tokenizer)[1] == "Go<|end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "expected .*'?rejected'?.*, found prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal, so that neither is preferred"),
        ({"chosen": "b", "rejected": "c"}, "two texts need their 'prompt' apart"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "'prompt' is ' '; it must be text"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "expected text or a list of messages in 'prompt', found 3"),
        ({"prompt": "a", "chosen": "b", "rejected": 4}, "in 'rejected', found 4"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "must both be text, or both be messages"),
        ({"prompt": "a", "chosen": [], "rejected": [BAD]}, "expected a list of messages in 'chosen'"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, "expected a string in 'content'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "'margin' is '1'; it must be a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "'margin' is True"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "'margin' is nan"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "do not begin alike"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "is the beginning of the other"),
        ({"prompt": "Ho", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "begin with is not the 'prompt'"),
        ({"chosen": [USER, GOOD], "rejected": [USER, SYSTEM]}, "'rejected' holds no message of the assistant"),
    ],
)
def test_a_row_that_cannot_be_compared_is_refused_with_the_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        READER.prepare(row)


def test_a_refused_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}
    source = write(tmp_path, [good, good, bad])

    with pytest.raises(ConfigError) as caught:
        load_rows(source, prepare=READER.prepare)

    assert caught.value.problems == [
        f"{source}, line 3: 'chosen' and 'rejected' are equal, so that neither is preferred; drop the row"
    ]


def test_a_csv_keeps_answers_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,chosen,rejected,margin\n6*7?,42,None,1\n", encoding="utf-8")

    (row,) = load_rows(str(file), prepare=READER.prepare)

    assert (row["chosen"], row["rejected"], row["margin"]) == ("42", "None", 1)


def test_margins_reach_the_batch_and_stand_in_every_row_or_none(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "Hi", "chosen": "b", "rejected": "c", "margin": margin} for margin in (2, 0.5)]
    data = build(rows, tokenizer)

    batch = READER.collator(tokenizer)([data[0], data[1]])

    assert batch["margin"].tolist() == [2.0, 0.5] and batch["margin"].dtype == torch.float32
    with pytest.raises(ConfigError, match="2 of 3 rows have a 'margin'"):
        build([*rows, {"prompt": "Hi", "chosen": "b", "rejected": "c"}], tokenizer)


def test_pads_are_told_by_length_although_the_pad_token_ends_each_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    data = build(
        [
            {"prompt": "Hi", "chosen": "Hello there", "rejected": "b"},
            {"prompt": "Hi", "chosen": "b", "rejected": "Hello there"},
        ],
        tokenizer,
    )
    collate = READER.collator(tokenizer)

    batch = collate([data[0], data[1]])

    assert collate.pad_token_id == tokenizer.eos_token_id
    for side in ("chosen", "rejected"):
        tokens, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        for index, length in enumerate(mask.sum(1).tolist()):
            assert torch.equal(tokens[index, :length], data[index][f"{side}_input_ids"])
            assert mask[index].tolist() == [1] * length + [0] * (tokens.shape[1] - length)
            assert batch[f"{side}_labels"][index, length - 1] == tokenizer.eos_token_id, "the end counts"
            assert (batch[f"{side}_labels"][index, length:] == -100).all()


def test_a_long_prompt_loses_as_many_tokens_on_the_left_of_both_sides(
    plain_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "one two three four five six", "chosen": " seven eight nine ten", "rejected": " no"}
    (whole,) = build([row], plain_tokenizer)
    size = len(whole["chosen_input_ids"]) - 3

    with caplog.at_level(logging.INFO):
        (cut,) = build([row], plain_tokenizer, block_size=size)

    for side in ("chosen", "rejected"):
        for part in ("input_ids", "labels"):
            assert torch.equal(cut[f"{side}_{part}"], whole[f"{side}_{part}"][3:])
    assert len(cut["chosen_input_ids"]) == size
    assert f"cut the prompts of 1 of 1 pairs on the left to fit {size} tokens" in caplog.text


def test_a_cut_keeps_the_begin_token() -> None:
    tokenizer = load_tokenizer("embedded:bpe-4k")
    tokenizer.chat_template = None
    row = {"prompt": "one two three four five six", "chosen": " a", "rejected": " b"}
    (whole,) = build([row], tokenizer)

    (cut,) = build([row], tokenizer, block_size=len(whole["chosen_input_ids"]) - 2)

    kept = torch.cat([whole["chosen_input_ids"][:1], whole["chosen_input_ids"][3:]])
    assert kept[0] == tokenizer.bos_token_id and torch.equal(cut["chosen_input_ids"], kept)


def test_a_pair_whose_answer_leaves_no_prompt_is_dropped_and_told(
    plain_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"prompt": "one", "chosen": " a", "rejected": " b"}
    long = {"prompt": "one", "chosen": " two three four five six seven", "rejected": " b"}
    answer = int((build([long], plain_tokenizer)[0]["chosen_labels"] != -100).sum())

    assert len(build([short, long], plain_tokenizer, block_size=answer + 1)) == 2, "one token of the prompt fits"
    with caplog.at_level(logging.WARNING):
        data = build([short, long], plain_tokenizer, block_size=answer)

    assert len(data) == 1 and decoded(data[0], "chosen", plain_tokenizer)[1] == " a<|end|>"
    assert f"dropped 1 of 2 pairs: an answer fills {answer} tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"none of 1 pairs fits into data\.block_size=3 tokens"):
        build([long], plain_tokenizer, block_size=3)


def test_messages_without_a_template_are_refused(plain_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="row 1: 'messages' need a chat template and the tokenizer has none"):
        build([{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}], plain_tokenizer)


@pytest.mark.parametrize("form", ["text", "messages", "conversations"])
def test_all_pairs_of_a_prompt_are_on_one_side_of_the_split(tmp_path: Path, form: str) -> None:
    def row(index: int) -> dict[str, Any]:
        prompt, answers = f"Question {index // 3}?", (f"right {index}", f"wrong {index}")
        if form == "text":  # case and white space do not matter
            return {"prompt": prompt.upper() if index % 2 else prompt, "chosen": answers[0], "rejected": answers[1]}
        asked = [{"role": "user", "content": prompt}]
        told = [[{"role": "assistant", "content": answer}] for answer in answers]
        if form == "messages":
            return {"prompt": asked, "chosen": told[0], "rejected": told[1]}
        return {"chosen": asked + told[0], "rejected": asked + told[1]}

    rows = load_rows(write(tmp_path, [row(index) for index in range(60)]), prepare=READER.prepare)
    sides = split_rows(rows, fraction=0.2, seed=3)

    assert [len(side) for side in sides] == [48, 12]
    prompts = [{json.dumps(row["prompt"]).casefold() for row in side} for side in sides]
    assert len(prompts[1]) == 4 and not prompts[0] & prompts[1]
