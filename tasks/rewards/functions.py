"""Rewards that can be verified: the right answer, its length, its form."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

_EDGES = string.whitespace + string.punctuation


def exact_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 where a completion is the right answer and else 0, without regard to case and to punctuation around it.

    Args:
        answer: The right one, or a list of those that are right; None: there is none, and no reward.
    """
    return [
        None if right is None else float(_bare(text) in map(_bare, _texts(right)))
        for text, right in zip(completions, answer, strict=True)
    ]


def contains_answer(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 where the right answer stands in a completion, as whole words and without regard to case, else 0.

    Args:
        answer: The right one, or a list of those that are right; None: there is none, and no reward.
    """
    return [
        None if right is None else float(any(_stands_in(one, text) for one in _texts(right)))
        for text, right in zip(completions, answer, strict=True)
    ]


def brevity(completions: Sequence[str], *, words: int = 1, most: int = 9) -> list[float]:
    """Returns 1 of a completion of up to so many `words`, 0 of one of `most` or more, and in between along a line.

    An empty one gets 0.
    """
    counts = [len(text.split()) for text in completions]
    return [min(1.0, max(0.0, (most - count) / (most - words))) if count else 0.0 for count in counts]


def matches(completions: Sequence[str], *, pattern: str) -> list[float]:
    """Returns 1 where a whole completion, without white space around it, is of the regular expression's form, else 0.

    A dot stands for line breaks too.
    """
    form = re.compile(pattern, re.DOTALL)
    return [float(form.fullmatch(text.strip()) is not None) for text in completions]


def _texts(right: Any) -> list[str]:
    return [str(one) for one in right] if isinstance(right, list | tuple) else [str(right)]


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).strip(_EDGES)


def _stands_in(right: str, text: str) -> bool:
    wanted = _bare(right)
    return (
        bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", " ".join(text.casefold().split())) is not None
    )
