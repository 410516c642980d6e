"""Rewards of answers: what functions are given, what they may return, and the weighted sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tasks.rewards import Answers, Rewards
from tasks.rewards.reading import Reward, read_reward_mapping
from tasks.rewards.running import means
from tasks.text.sequences import Exchange

CPU = torch.device("cpu")
ANSWERS = Answers(
    prompts=["Why?", "How?"],
    completions=["so", "like this"],
    exchanges=[Exchange(prompt=[1], answer=[2, 3], column=1), Exchange(prompt=[1], answer=[4], column=1)],
    raw_prompts=["Why?", "How?"],
    columns={"answer": ["so", None], "level": [1, 2]},
)


def rewards_of(**functions: Callable[..., Any]) -> Rewards:
    return Rewards({name: Reward(name=name, function=function) for name, function in functions.items()})


def test_a_function_is_given_what_it_takes_and_copies() -> None:
    seen: dict[str, Any] = {}

    def spoil(**given: Any) -> list[float]:
        seen.update(given)
        given["completions"].clear()
        return [1.0, 2.0]

    values = rewards_of(spoil=spoil, after=lambda prompts, completions, level: [len(text) for text in completions])
    values.rewards["after"] = Reward(
        name="after",
        function=values.rewards["after"].function,
        takes=frozenset({"prompts", "completions", "level"}),
    )

    found = values.score(ANSWERS, device=CPU)

    assert found.tolist() == [[1.0, 2.0], [2.0, 9.0]] and found.dtype == torch.float32
    assert seen["completion_ids"] == [[2, 3], [4]] and seen["answer"] == ["so", None] and seen["level"] == [1, 2]


def test_components_are_weighted_and_none_does_not_count() -> None:
    given = read_reward_mapping(
        {"exact_answer": {"weight": 2.0}, "brevity": {"weight": 0.5}, "contains_answer": {"weight": 0}}
    )

    values = Rewards(given).score(ANSWERS, device=CPU)

    assert values[0].tolist() == [1.0, 1.0, 1.0] and values[1, 1] == 0.875
    assert values[1, 0].isnan() and values[1, 2].isnan()
    assert Rewards(given).total(values).tolist() == [2.5, 0.4375]
    assert {name: (s.item(), n.item()) for name, (s, n) in means(values, list(given)).items()} == {
        "exact_answer": (1.0, 1),
        "brevity": (1.875, 2),
        "contains_answer": (1.0, 1),
    }


def test_an_answer_without_any_reward_has_none() -> None:
    values = torch.tensor([[math.nan, math.nan], [1.0, math.nan], [math.nan, 3.0]])
    rewards = Rewards({"a": Reward(name="a", weight=2.0), "watched": Reward(name="watched", weight=0.0)})

    assert rewards.total(values).isnan().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], "task.rewards.own returned 1 values for 2 answers"),
        (None, "returned no list for 2 answers"),
        ("ab", "returned no list"),
        ({"a": 1, "b": 2}, "returned no list"),
        (1.0, "returned no list"),
        ([1.0, math.nan], "returned nan for the answer 'like this' to 'How?'"),
        ([math.inf, 1.0], "returned inf for the answer 'so'"),
        ([1e300, 1.0], "returned 1e+300 for the answer 'so'"),
        (["1", 2], "returned '1'"),
        ([[1], 2], "returned [1] for the answer"),
    ],
)
def test_what_is_no_reward_is_named(returned: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        rewards_of(own=lambda **_: returned).score(ANSWERS, device=CPU)


@pytest.mark.parametrize("returned", [torch.tensor([1, 2]), (1, 2.0), [True, 2], (number for number in (1, 2))])
def test_numbers_of_any_kind_are_taken(returned: Any) -> None:
    assert rewards_of(own=lambda **_: returned).score(ANSWERS, device=CPU).tolist() == [[1.0], [2.0]]


def test_an_error_inside_a_function_names_the_reward() -> None:
    def broken(**given: Any) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(KeyError) as error:
        rewards_of(own=broken).score(ANSWERS, device=CPU)

    assert "raised by the function of task.rewards.own" in error.value.__notes__[0]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_model_that_scores_with_no_number_is_named(score: float) -> None:
    rewards = Rewards({"helpful": Reward(name="helpful", model="judge")})
    rewards.scorers["helpful"] = lambda answers: torch.tensor([1.0, score])  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"models\.judge, which gives task\.rewards\.helpful, scored 1 of 2 answers"):
        rewards.score(ANSWERS, device=CPU)
