"""Rewards of answers: what functions are given, what they may return, and the weighted sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from tasks.rewards import Answers, RewardError, Rewards
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


class Mute:
    """A value that is no number, and fails at saying what it is."""

    def __repr__(self) -> str:
        raise KeyError("repr")

    def __float__(self) -> float:
        raise SystemExit(3)


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("str")


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
    assert Rewards(given).total(values, ANSWERS).tolist() == [2.5, 0.4375]
    assert {name: (s.item(), n.item()) for name, (s, n) in means(values, list(given)).items()} == {
        "exact_answer": (1.0, 1),
        "brevity": (1.875, 2),
        "contains_answer": (1.0, 1),
    }


def test_an_answer_without_any_reward_has_none() -> None:
    values = torch.tensor([[math.nan, math.nan], [1.0, math.nan], [math.nan, 3.0]])
    rewards = Rewards({"a": Reward(name="a", weight=2.0), "watched": Reward(name="watched", weight=0.0)})

    assert rewards.total(values, ANSWERS).isnan().tolist() == [True, False, True]


def test_the_mean_of_rewards_whose_sum_no_float32_holds_is_told() -> None:
    (total, number) = means(torch.full((4, 1), 3e38), ["big"])["big"]

    assert (total / number).item() == pytest.approx(3e38)


def test_a_weighted_sum_that_no_float32_holds_names_the_reward_its_weight_and_the_answer() -> None:
    rewards = Rewards({name: Reward(name=name, weight=weight) for name, weight in (("small", 1.0), ("big", 10.0))})

    with pytest.raises(RewardError) as error:
        rewards.total(torch.tensor([[1.0, 1.0], [1.0, 3e38]]), ANSWERS)

    told = str(error.value)
    assert told.startswith("task.rewards.big gave 3e+38, and task.rewards.big.weight is 10: the weighted sum is 3e+39")
    assert "for the answer 'like this' to 'How?' (number 2 of 2), and a float32 holds at most 3.403e+38" in told
    opposed = Rewards({name: Reward(name=name, weight=weight) for name, weight in (("a", 10.0), ("b", -10.0))})
    assert opposed.total(torch.tensor([[3e38, 3e38]]), ANSWERS).tolist() == [0.0], "only the sum must fit"


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
        ([torch.zeros(2), 2], "returned tensor([0., 0.]) for the answer"),
        ([10**400, 2], "returned 1000"),
        ([10**5000, 2], "returned (int that cannot be shown) for the answer 'so'"),  # more digits than Python tells
        ([2, Mute()], "returned (Mute that cannot be shown) for the answer 'like this' to 'How?'"),
        ([1, 2, 3, 4], "returned more than 2 values for 2 answers"),
    ],
)
def test_what_is_no_reward_is_named(returned: Any, told: str) -> None:
    with pytest.raises(RewardError, match=re.escape(told)):
        rewards_of(own=lambda **_: returned).score(ANSWERS, device=CPU)


@pytest.mark.parametrize("returned", [torch.tensor([1, 2]), (1, 2.0), [True, 2], (number for number in (1, 2))])
def test_numbers_of_any_kind_are_taken(returned: Any) -> None:
    assert rewards_of(own=lambda **_: returned).score(ANSWERS, device=CPU).tolist() == [[1.0], [2.0]]


def test_an_error_inside_a_function_names_the_reward_and_the_answer_that_raises_it() -> None:
    sizes = []

    def broken(prompts: list[str], completions: list[str], level: list[int], **rest: Any) -> list[float]:
        sizes.append((len(prompts), len(completions), len(level)))
        return [{1: 0.0}[one] for one in level]

    with pytest.raises(RewardError) as error:
        rewards_of(own=broken).score(ANSWERS, device=CPU)

    told = "task.rewards.own raised KeyError: 2, for the answer 'like this' to 'How?' (number 2 of 2); mend it"
    assert told in str(error.value) and repr(error.value.__cause__) == "KeyError(2)"
    assert sizes == [(2, 2, 2), (1, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MuteError(), "raised MuteError: (MuteError that cannot be shown), for the answer"),
        (SystemExit(3), "raised SystemExit: 3, for the answer"),
        (SystemExit(), "raised SystemExit, for the answer"),
    ],
)
def test_an_error_of_any_kind_names_the_reward_the_answer_and_the_prompt(error: BaseException, told: str) -> None:
    def leave(completions: list[str], **rest: Any) -> list[float]:
        if "like this" in completions:
            raise error
        return [1.0] * len(completions)

    with pytest.raises(RewardError) as found:
        rewards_of(own=leave).score(ANSWERS, device=CPU)

    assert f"task.rewards.own {told} 'like this' to 'How?' (number 2 of 2)" in str(found.value)
    assert found.value.__cause__ is error


def test_an_interrupt_inside_a_function_is_the_runs_own() -> None:
    def interrupted(**rest: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards_of(own=interrupted).score(ANSWERS, device=CPU)


def test_a_generator_that_never_ends_is_refused() -> None:
    def endless(**rest: Any) -> Iterator[float]:
        for number in count():
            assert number < 10
            yield 1.0

    with pytest.raises(RewardError, match="returned more than 2 values for 2 answers"):
        rewards_of(own=endless).score(ANSWERS, device=CPU)


def test_an_error_of_answers_together_is_of_none_of_them() -> None:
    def alone(completions: list[str], **rest: Any) -> list[float]:
        if len(completions) > 1:
            raise OSError("one at a time,\nplease")
        return [1.0]

    with pytest.raises(RewardError, match="raised OSError: one at a time, please, for 2 answers, for none of them by"):
        rewards_of(own=alone).score(ANSWERS, device=CPU)


def test_a_generator_that_raises_is_named_and_long_texts_are_cut() -> None:
    def lazy(completions: list[str], **rest: Any) -> Iterator[float]:
        for text in completions:
            yield float(text)

    answers = replace(ANSWERS, completions=["1", f"one {'and ' * 99}end"])
    with pytest.raises(RewardError) as error:
        rewards_of(own=lazy).score(answers, device=CPU)

    told = str(error.value)
    assert "raised ValueError: could not convert string to float: 'one and " in told and len(told) < 500
    assert "for the answer 'one and and " in told and "and end' to 'How?' (number 2 of 2)" in told


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_model_that_scores_with_no_number_is_named(score: float) -> None:
    rewards = Rewards({"helpful": Reward(name="helpful", model="judge")})
    rewards.scorers["helpful"] = lambda answers: torch.tensor([1.0, score])  # type: ignore[assignment]

    with pytest.raises(RewardError, match=r"models\.judge, which gives task\.rewards\.helpful, scored 1 of 2 answers"):
        rewards.score(ANSWERS, device=CPU)
