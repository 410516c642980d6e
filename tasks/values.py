"""What a single value of a task's configuration must be."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from trainer import ConfigError, did_you_mean

SINGLE = (2 - 2**-23) * 2.0**127  # the largest number that a float32 holds


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a number that a float holds; true and false are none, and neither are nan and inf."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # math.isfinite raises for a whole number of 400 digits


def is_single(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a number that a float32 holds, which is what losses and rewards are computed in."""
    return is_number(value) and abs(value) <= SINGLE


def is_whole(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_at_least(value: Any, least: float) -> bool:
    """Returns whether a value is a number, and no less than another."""
    return is_number(value) and value >= least


def is_above(value: Any, least: float) -> bool:
    """Returns whether a value is a number, and more than another."""
    return is_number(value) and value > least


def find_value_problems(key: str, **values: tuple[Any, bool, str]) -> list[str]:
    """Returns the problem of each value that is not right.

    Args:
        key: What the names stand under, such as "task".
        values: By name: the value, whether it is right, and what it must be.
    """
    return [
        f"{key}.{name}={value!r}: must be {wanted}"
        for name, (value, is_right, wanted) in values.items()
        if not is_right
    ]


def find_unknown_keys(key: str, given: Iterable[Any], known: Sequence[str]) -> list[str]:
    """Returns which keys of a mapping are none of those that it may have.

    Args:
        key: Where it stands, such as "task.generation".
    """
    return [
        f"{key}.{name} is unknown, only {', '.join(known)}{did_you_mean(str(name), known)}"
        for name in given
        if name not in known
    ]


def find_role_problems(roles: Mapping[str, Any]) -> list[str]:
    """Returns which keys of the task do not name a model; whether there is a model of the name is checked later."""
    return [
        f"task.{role} is {name!r}; it must be the name of a model"
        for role, name in roles.items()
        if not (isinstance(name, str) and name)
    ]


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Adds what is refused within it to the problems, so that all are told at once."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
