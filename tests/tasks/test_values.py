"""What a single value of a task's configuration must be."""

import math
import sys
from typing import Any

import pytest

from tasks.values import find_role_problems, find_value_problems, is_above, is_at_least, is_number, is_whole


@pytest.mark.parametrize("value", [0, -1, 0.5, 10**300, sys.float_info.max, 5e-324])
def test_what_a_float_holds_is_a_number(value: Any) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, -math.inf, math.nan, True, "1", None, [1]])
def test_what_no_float_holds_is_none(value: Any) -> None:
    assert not is_number(value)


def test_whole_numbers_are_of_any_size_and_no_switches() -> None:
    assert is_whole(0) and is_whole(10**400)
    assert not any(is_whole(value) for value in (True, 1.0, "1", None))


@pytest.mark.parametrize("value", ["", None, 3, True, ["a"], {"a": 1}])
def test_a_role_is_the_name_of_a_model(value: Any) -> None:
    assert find_role_problems({"student": "a", "teacher": value}) == [
        f"task.teacher is {value!r}; it must be the name of a model"
    ]


def test_limits_of_numbers() -> None:
    assert is_at_least(0, 0) and is_above(0.1, 0)
    assert not is_above(0, 0) and not is_at_least(-0.1, 0)
    assert not any(limit(value, 0) for limit in (is_above, is_at_least) for value in (True, "1", None, math.inf))


def test_the_problem_of_a_value_names_it_and_what_it_must_be() -> None:
    found = find_value_problems("task", clip=(2, False, "a number up to 1"), lam=(1, True, "a number"))

    assert found == ["task.clip=2: must be a number up to 1"]
