"""What `task.rewards` may say, and what is told of it before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.rewards import read_rewards
from tasks.rewards.reading import read_reward_mapping
from trainer import ConfigError

HERE = "tests.tasks.rewards.test_reading"


def own(completions: list[str], *, level: list[int], scale: float = 1.0) -> list[float]:
    return [scale * one for one in level]


def takes_all(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(columns))] * len(completions)


def by_place(completions: list[str], /) -> list[float]:
    return [0.0] * len(completions)


async def later(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def of_prompt(completions: list[str], prompt: list[str]) -> list[float]:
    return [1.0] * len(completions)


NUMBER = 3


def problems_of(values: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_rewards(values)
    return error.value.problems


def test_a_function_is_named_by_its_key_or_its_path() -> None:
    found = read_reward_mapping(
        {"brevity": {"words": 2}, "mine": {"function": f"{HERE}.own", "weight": -0.5, "scale": 2.0}}
    )

    assert found["brevity"].weight == 1.0 and found["brevity"].arguments == {"words": 2}
    assert found["mine"].function is own and found["mine"].weight == -0.5
    assert found["mine"].needs == ("level",) and found["mine"].takes == {"completions", "level"}


def test_a_reward_of_a_preset_is_left_out_by_null() -> None:
    assert list(read_reward_mapping({"brevity": None, "exact_answer": {}})) == ["exact_answer"]
    assert "nothing would be learnt" in problems_of({"brevity": None})[0]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"function": "brevit"}, "task.rewards.x.function=brevit: no reward function; did you mean brevity?"),
        ({"function": f"{HERE}.onw"}, "did you mean own?"),
        ({"function": f"{HERE}.NUMBER"}, "not a function"),
        ({"function": "no_such_package.own"}, "there is no package no_such_package"),
        ({"function": "brevity", "wrods": 2}, "x.wrods: the function has no such parameter; did you mean words?"),
        ({"function": "brevity", "completions": []}, "x.completions: the task gives this one itself"),
        ({"function": "brevity", "weight": "much"}, "x.weight is 'much'; it must be a finite number"),
        ({"function": "brevity", "weight": float("nan")}, "it must be a finite number"),
        ({"function": "brevity", "weight": 1e39}, "one that a float32 holds"),
        ({"function": "brevity", "model": "reward"}, "x has both function and model"),
        ({"model": 3}, "x.model is 3"),
        ({"model": "reward", "scale": 2}, "x.scale is no key of a model's reward"),
        ({"function": f"{HERE}.by_place"}, "its parameter completions cannot be given by name"),
        ({"function": f"{HERE}.later"}, "is a coroutine"),
        ({"function": "brevity", "words": 9}, "words=9 and most=9 must be whole numbers"),
        ({"function": "matches"}, "x.pattern is missing"),
        ({"function": "matches", "pattern": "("}, "no regular expression"),
        (3, "task.rewards.x is 3; it must be a mapping"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(reward: Any, told: str) -> None:
    (problem,) = problems_of({"x": reward, "brevity": {}})

    assert told in problem


def test_everything_is_told_at_once() -> None:
    assert len(problems_of({"a": {"function": "b.c", "weight": "x"}, "d e": {}, "f": 1})) == 4
    assert "must be a mapping" in problems_of([])[0]
    assert "has no reward with a weight other than 0" in problems_of({})[0]
    assert "has no reward with a weight other than 0" in problems_of({"brevity": {"weight": 0}})[0]


def test_a_column_that_the_rows_lack_is_named_with_the_nearest() -> None:
    rewards = read_rewards({"exact_answer": {}, "mine": {"function": f"{HERE}.own"}})

    found = rewards.check_batch({"columns": {"answers": [], "level": []}}, "data.train")

    (problem,) = found
    assert problem.startswith(
        "task.rewards.exact_answer.function needs the column 'answer', and the rows of data.train"
    )
    assert problem.endswith("have only answers, level; did you mean answers?")
    assert rewards.check_batch({"columns": {"answer": [], "level": []}}, "data.train") == []


def test_a_function_that_asks_for_the_prompt_is_told_its_name() -> None:
    rewards = read_rewards({"mine": {"function": f"{HERE}.of_prompt"}})

    (problem,) = rewards.check_batch({"columns": {"prompt": [], "answer": []}}, "data.train")

    assert problem.startswith("task.rewards.mine.function takes 'prompt'") and "name it prompts" in problem


def test_the_model_of_a_reward_must_be_there_and_frozen() -> None:
    rewards = read_rewards({"helpful": {"model": "reward"}, "safe": {"model": "saefty"}, "both": {"model": "reward"}})

    missing, trained, again = rewards.check_models({"actor": True, "reward": True, "safety": False})

    assert rewards.model_names == ["reward", "saefty"]
    assert "task.rewards.safe.model=saefty: models has no saefty; did you mean safety?" in (missing, trained, again)
    assert sum("models.reward.trainable=true, but task.rewards." in one for one in (missing, trained, again)) == 2


def test_a_function_of_any_columns_needs_none() -> None:
    found = read_reward_mapping({"all": {"function": f"{HERE}.takes_all", "anything": 3}})["all"]

    assert found.takes is None and found.needs == () and found.arguments == {"anything": 3}
