"""A number that may change over the run, such as a term's weight or temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.values import is_number, is_whole
from trainer import did_you_mean

SHAPES = ("linear", "cosine")
KEYS = ("start", "end", "steps", "shape")


@dataclass(kw_only=True, frozen=True)
class Schedule:
    """Goes from `start`, in step 1, to `end`, in step `steps`, and stays there.

    Args:
        shape: "linear", or "cosine": half a period, flat at both ends.
    """

    start: float
    end: float
    steps: int = 1
    shape: str = "linear"

    def at(self, step: int) -> float:
        """Returns the value in a global step, 1-based."""
        share = 1.0 if self.steps == 1 else min(max(step - 1, 0) / (self.steps - 1), 1.0)
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share

    def values(self) -> set[float]:
        """Returns the values between which all others lie."""
        return {self.start, self.end}

    @property
    def is_constant(self) -> bool:
        return self.start == self.end


def parse_schedule(key: str, given: Any) -> tuple[Schedule | None, list[str]]:
    """Returns the schedule of a number or of {start, end, steps, shape}, and what is wrong with it."""
    if is_number(given):
        return Schedule(start=float(given), end=float(given)), []
    rule = "it must be a finite number, or {start: 1.0, end: 0.1, steps: 100} with an optional shape"
    if not isinstance(given, Mapping):
        return None, [f"{key} is {given!r}; {rule}"]
    problems = [
        f"{key}.{name} is no key of a schedule{did_you_mean(str(name), KEYS)}" for name in given if name not in KEYS
    ]
    problems += [f"{key}.{name} is missing; {rule}" for name in KEYS[:3] if name not in given]
    problems += [
        f"{key}.{name} is {given[name]!r}; it must be a finite number"
        for name in ("start", "end")
        if name in given and not is_number(given[name])
    ]
    steps, shape = given.get("steps"), given.get("shape", "linear")
    if "steps" in given and not (is_whole(steps) and steps >= 1):
        problems.append(f"{key}.steps is {steps!r}; it must be a whole number of at least 1")
    if shape not in SHAPES:
        problems.append(
            f"{key}.shape is {shape!r}; it must be one of {', '.join(SHAPES)}{did_you_mean(str(shape), SHAPES)}"
        )
    return (None, problems) if problems else (Schedule(**given), [])
