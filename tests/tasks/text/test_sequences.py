"""Prompts and answers: taken out of batches, told in other tokens, and put together."""

from typing import Any

import pytest
import torch

from tasks.text.sequences import (
    Exchange,
    Interpreter,
    answer_mask,
    decode,
    encode_prompt,
    exchanges_of,
    find_packing_problem,
    join,
)
from tests.tasks.tiny_tokenizers import SPECIAL, TEMPLATE, WORDY, make_tokenizer
from trainer.config import ConfigError

NOT = -100
CHAT = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "yes, it is."},
    {"role": "user", "content": "why?"},
]


def exchange(prompt: list[int], answer: list[int]) -> Exchange:
    return Exchange(prompt=prompt, answer=answer, column=len(prompt))


# Batches


def test_the_last_answer_of_a_row_and_all_before_it() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 3], [5, 6, 7, 0, 0, 0], [5, 6, 7, 8, 0, 0]]),
        "labels": torch.tensor(
            [[NOT, NOT, 7, 8, NOT, NOT], [NOT, 6, NOT, NOT, 9, 3], [NOT] * 6, [5, 6, 7, 8, NOT, NOT]]
        ),
        "attention_mask": torch.tensor(
            [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
        ),
    }

    found = exchanges_of(batch)

    assert [(one.prompt, one.answer, one.column) for one in found] == [
        ([5, 6], [7, 8], 2),
        ([5, 6, 7, 8], [9, 3], 4),
        ([], [], 1),
        ([5], [6, 7, 8], 1),  # nothing predicts the first token of a text
    ]


def test_padding_on_the_left_moves_the_column_only() -> None:
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7]]),
        "labels": torch.tensor([[NOT, NOT, NOT, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    }

    (found,) = exchanges_of(batch)

    assert (found.prompt, found.answer, found.column) == ([5], [6, 7], 3)
    mask = answer_mask([found.column], [2], like=batch["input_ids"])
    assert mask.tolist() == [[False, False, True, True]]  # after tokens 5 and 6


def test_join_is_what_exchanges_of_takes_apart() -> None:
    given = [exchange([5, 6, 7], [8]), exchange([5], [6, 7, 9, 3]), exchange([4, 4], [])]

    batch = join(given, pad_id=0, device=torch.device("cpu"))

    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0], [5, 6, 7, 9, 3], [4, 4, 0, 0, 0]]
    assert batch["labels"].tolist() == [[NOT, NOT, NOT, 8, NOT], [NOT, 6, 7, 9, 3], [NOT] * 5]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5, [1, 1, 0, 0, 0]]
    assert exchanges_of(batch)[:2] == given[:2]


def test_a_row_of_nothing_attends_to_one_token() -> None:
    batch = join([exchange([], [])], pad_id=0, device=torch.device("cpu"))

    assert (batch["input_ids"].tolist(), batch["attention_mask"].tolist()) == ([[0, 0]], [[1, 0]])
    assert (batch["labels"] == NOT).all()


def test_masks_end_with_the_shorter_of_a_pair() -> None:
    tokens = torch.zeros(3, 6, dtype=torch.long)

    assert answer_mask([2, 1, 3], [2, 0, 3], like=tokens).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1],
    ]


def test_packed_rows_are_refused() -> None:
    (problem,) = find_packing_problem({"input_ids": torch.zeros(1, 2), "position_ids": torch.zeros(1, 2)}, "data.train")
    assert problem.startswith("data.train: ") and problem.endswith("data.packing=false")


# Tokens of another model


def interpreter(*, source: str | None = TEMPLATE, target: str | None = WORDY) -> Interpreter:
    return Interpreter(make_tokenizer(["t h", "th e"], template=source), make_tokenizer(["a t"], template=target))


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]], ids=["system", "turns", "one"])
@pytest.mark.parametrize("templates", [(TEMPLATE, WORDY), (WORDY, TEMPLATE)], ids=["to words", "to tokens"])
def test_a_conversation_is_told_in_the_other_template(messages: Any, templates: tuple[str, str]) -> None:
    told = interpreter(source=templates[0], target=templates[1])

    assert told.prompt(encode_prompt(messages, told.source)) == encode_prompt(messages, told.target)


def test_without_a_template_the_text_is_what_the_user_says() -> None:
    source, target = make_tokenizer(), make_tokenizer(["a t"], template=TEMPLATE)

    ids = Interpreter(source, target).prompt(source("the cat")["input_ids"])

    assert decode(target, ids) == "<user>the cat<bot>"


def test_a_target_without_a_template_reads_the_messages_alone() -> None:
    told = interpreter(target=None)

    assert decode(told.target, told.prompt(encode_prompt(CHAT[1:2], told.source))) == "the cat"


def test_a_prompt_without_text_becomes_one_token_that_predicts_the_first_of_the_answer() -> None:
    source, target = make_tokenizer(), make_tokenizer(["a t"], special=("<end>", "<pad>"))
    told = Interpreter(source, target).tell([exchange([SPECIAL.index("<user>")], source("a cat<end>")["input_ids"])])

    assert [(one.prompt, one.answer, one.column) for one in told] == [([1], target("a cat<end>")["input_ids"], 1)]


def test_an_answer_keeps_its_end_once_and_its_text() -> None:
    told = interpreter()
    prompt, answer = told.source("the")["input_ids"], told.source(" cat at the end.<end>")["input_ids"]

    ids = told.answer(answer, prompt=prompt)

    assert ids == told.target(" cat at the end.<end>")["input_ids"]
    assert told.answer(answer[:-1], prompt=prompt) == ids[:-1]  # cut before its end: none is made up
    assert ids != answer


def test_the_same_tokenizer_and_template_changes_nothing() -> None:
    same = Interpreter(make_tokenizer(template=TEMPLATE), make_tokenizer(template=TEMPLATE))

    assert (same.is_same, same.prompt([7, 8]), same.answer([9, 1])) == (True, [7, 8], [9, 1])
    assert not Interpreter(make_tokenizer(template=TEMPLATE), make_tokenizer(template=WORDY)).is_same


def test_other_end_tokens_of_the_writer_end_an_answer_too() -> None:
    source, target = make_tokenizer(template=TEMPLATE), make_tokenizer(["a t"], template=TEMPLATE)
    ids = source("a cat<sys>")["input_ids"]

    told = Interpreter(source, target, ends={1, ids[-1]}).answer(ids)

    assert told == target("a cat<end>")["input_ids"]


def test_a_prompt_of_another_form_is_refused_with_its_text() -> None:
    told = interpreter()

    with pytest.raises(ValueError, match="cannot be told in another template: 'the cat'"):
        told.prompt(told.source("the cat")["input_ids"])


def test_a_template_with_nothing_between_messages_is_refused() -> None:
    glued = make_tokenizer(template="{% for message in messages %}{{ message.content }}{% endfor %}")

    with pytest.raises(ConfigError, match="cannot be told apart"):
        Interpreter(glued, make_tokenizer(["a t"], template=TEMPLATE))
