"""What a single value of a task's configuration must be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a number that a float holds; true and false are none, and neither are nan and inf."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # math.isfinite raises for a whole number of 400 digits


def is_whole(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def find_role_problems(roles: Mapping[str, Any]) -> list[str]:
    """Returns which keys of the task do not name a model; whether there is a model of the name is checked later."""
    return [
        f"task.{role} is {name!r}; it must be the name of a model"
        for role, name in roles.items()
        if not (isinstance(name, str) and name)
    ]
