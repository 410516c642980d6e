"""An answer ends with an end token, or with the token that completes a stop text."""

import pytest
import torch

from tasks.generation.stops import StopTexts, ends_in_stop, up_to_end, up_to_stop
from tests.tasks.tiny_tokenizers import make_tokenizer

TOKENIZER = make_tokenizer(["t h", "th e", "e n"])


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER(text)["input_ids"]]


def test_an_answer_goes_up_to_and_with_the_first_end() -> None:
    assert up_to_end([3, 4, 1], {1, 4}) == ([3, 4], True)
    assert up_to_end([3, 5], {1, 4}) == ([3, 5], False)
    assert up_to_end([], {1}) == ([], False)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("a cat. the end", [". t"], "a cat. the"),  # the token that completes it says more
        ("a cat. the end", ["cat", "a c"], "a c"),  # the one that is completed first
        ("a cat<end>b", ["<end>"], "a cat<end>"),
        ("aaaa", ["aa"], "aa"),
        ("the", ["the"], "the"),
    ],
)
def test_a_stop_text_is_found_where_a_token_completes_it(text: str, stop: list[str], expected: str) -> None:
    found, is_ended = up_to_stop(ids_of(text), stop, tokenizer=TOKENIZER)

    assert (TOKENIZER.decode(found), is_ended) == (expected, True)


def test_without_a_stop_text_all_is_kept() -> None:
    assert up_to_stop(ids_of("a cat"), ["dog"], tokenizer=TOKENIZER) == (ids_of("a cat"), False)
    assert up_to_stop(ids_of("a cat"), [], tokenizer=TOKENIZER) == (ids_of("a cat"), False)
    assert not ends_in_stop([], ["x"], tokenizer=TOKENIZER)


def test_a_long_answer_is_looked_at_from_its_end_only() -> None:
    long = ids_of("abc" + "x" * 50)

    assert not ends_in_stop(long, ["abc"], tokenizer=TOKENIZER)
    assert ends_in_stop([*long, *ids_of("abc")], ["abc"], tokenizer=TOKENIZER)


def test_rows_end_on_their_own_and_the_prompt_does_not_count() -> None:
    rows = [ids_of("..ab"), ids_of("abcd"), ids_of("..dc")]
    criteria = StopTexts(["ab", "cd"], tokenizer=TOKENIZER, prompt_width=2, num_rows=3)

    ended = [criteria(torch.tensor([row[:width] for row in rows]), None).tolist() for width in (3, 4)]

    assert ended == [[False, False, False], [True, True, False]]
    assert criteria.lengths == [2, 2, None]
    # A row that has ended is padded; what the pads say is not looked at.
    criteria(torch.tensor([[*row, 0] for row in rows]), None)
    assert criteria.lengths == [2, 2, None]
