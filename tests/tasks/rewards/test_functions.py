"""The verifiable rewards that are shipped."""

from __future__ import annotations

import pytest

from tasks.rewards.functions import brevity, contains_answer, exact_answer, matches


@pytest.mark.parametrize(
    ("text", "right", "is_exact", "is_there"),
    [
        ("cold", "cold", 1.0, 1.0),
        (" Cold.\n", "cold", 1.0, 1.0),
        ("The opposite of 'hot' is 'cold'.", "cold", 0.0, 1.0),
        ("cold-blooded", "cold", 0.0, 1.0),
        ("scolded", "cold", 0.0, 0.0),
        ("", "cold", 0.0, 0.0),
        ("in  the North", "the north", 0.0, 1.0),
        ("7", 7, 1.0, 1.0),
        ("icy", ["cold", "icy"], 1.0, 1.0),
        ("a. b", "a.", 0.0, 1.0),
        ("anything", None, None, None),
        ("anything", "", 0.0, 0.0),
    ],
)
def test_an_answer_is_compared_without_case_and_edges(
    text: str, right: object, is_exact: float | None, is_there: float | None
) -> None:
    assert exact_answer([text], [right]) == [is_exact]
    assert contains_answer([text], [right]) == [is_there]


def test_brevity_falls_along_a_line_with_the_words_beyond_those_allowed() -> None:
    assert brevity(["", "one", "one two", "a b c d e", "w " * 9, "w " * 20]) == [0.0, 1.0, 0.875, 0.5, 0.0, 0.0]
    assert brevity(["one two", "one two three four"], words=2, most=6) == [1.0, 0.5]


def test_the_whole_completion_must_match() -> None:
    pattern = r"<think>.*</think>\s*\d+"

    assert matches(["<think>a\nb</think>\n42 ", "<think></think>", "so <think>a</think>4"], pattern=pattern) == [
        1,
        0,
        0,
    ]
