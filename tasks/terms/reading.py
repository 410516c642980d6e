"""Reads a mapping of loss terms: what the terms of every task have in common, and all that is wrong at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from tasks.losses.features import hidden_cosine, hidden_mse
from tasks.terms.schedule import Schedule, parse_schedule
from tasks.values import is_whole
from trainer import ConfigError, did_you_mean

StateLoss = Callable[[Tensor, Tensor], Tensor]

STATE_LOSSES: dict[str, StateLoss] = {"hidden_mse": hidden_mse, "hidden_cosine": hidden_cosine}
RELATIONS = "attention_relations"
ONE = Schedule(start=1.0, end=1.0)
TAKEN = ("loss", "lr", "grad_norm", "updates", "skipped_updates", "loss_scale")  # what the trainer logs of a model


class Weighted(Protocol):
    """A term of any task."""

    weight: Schedule


AnyWeighted = TypeVar("AnyWeighted", bound=Weighted)


@dataclass(kw_only=True)
class Reading:
    """A term that is being read: its keys, and what is wrong with them."""

    key: str
    given: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def function(self) -> Any:
        return self.given["function"]

    def refuse(self, name: str, rule: str) -> None:
        self.problems.append(f"{self.key}.{name} is {self.given[name]!r}; {rule}")

    def allow(self, keys: tuple[str, ...]) -> None:
        for name in self.given:
            if name not in keys:
                hint = did_you_mean(str(name), keys) or f"; {self.function} has {', '.join(keys)}"
                self.problems.append(f"{self.key}.{name} is no key of this term{hint}")

    def weight(self) -> Schedule:
        return self._schedule("weight", ONE.start, least=0, is_least_allowed=True)

    def temperature(self, default: float) -> Schedule:
        return self._schedule("temperature", default, least=0, is_least_allowed=False)

    def choice(self, name: str, default: str, choices: Collection[str]) -> str:
        value = self.given.get(name, default)
        if value not in tuple(choices):
            self.refuse(name, f"{name}s are {', '.join(choices)}{did_you_mean(str(value), choices)}")
        return str(value)

    def layers(self, *, example: str) -> Mapping[str, str]:
        """Returns the student's module paths to the teacher's."""
        layers = self.given.get("layers")
        rule = f'give module paths of the student to those of the teacher: {{"{example}": "{example}"}}'
        if layers is None:
            self.problems.append(f"{self.key}.layers is missing; {rule}")
        elif not (isinstance(layers, Mapping) and layers and all(isinstance(p, str) and p for p in layers.values())):
            self.refuse("layers", rule)
        else:
            return {str(mine): theirs for mine, theirs in layers.items()}
        return {}

    def heads(self) -> int:
        heads = self.given.get("heads", 1)
        if is_whole(heads) and heads >= 1:
            return heads
        self.refuse("heads", "it must be a whole number of at least 1")
        return 1

    def _schedule(self, name: str, default: float, *, least: float, is_least_allowed: bool) -> Schedule:
        schedule, problems = parse_schedule(f"{self.key}.{name}", self.given.get(name, default))
        self.problems += problems
        lowest = min(schedule.values()) if schedule else least + 1
        if lowest < least or (lowest == least and not is_least_allowed):
            self.refuse(name, f"it must be {'at least' if is_least_allowed else 'above'} {least:g}")
        return schedule or ONE


def read_terms(
    terms: Mapping[str, Mapping[str, Any]],
    read: Callable[[Reading], AnyWeighted | None],
    *,
    key: str = "task.terms",
    taken: Collection[str] = (),
) -> dict[str, AnyWeighted]:
    """Returns the terms that count, or raises one ConfigError with everything that is wrong in them.

    Args:
        terms: Name of a term to its keys; its function is the term's name unless it is given.
        read: A term's keys to the task's own term; None: the reading has problems.
        taken: Names of the task's other metrics, which no term may have.
    """
    if not isinstance(terms, Mapping):
        rule = "it must be a mapping of names to terms, {<name>: {function: <function>, weight: 1.0}}"
        raise ConfigError(f"{key} is {terms!r}; {rule}")
    found: dict[str, AnyWeighted] = {}
    problems: list[str] = []
    for name, given in terms.items():
        problems += _find_name_problems(key, name, taken=(*TAKEN, *taken))
        if not isinstance(given, Mapping):
            problems.append(f"{key}.{name} is {given!r}; it must be a mapping such as {{weight: 1.0}}")
            continue
        reading = Reading(key=f"{key}.{name}", given={"function": name, **given})
        term = read(reading)
        problems += reading.problems
        if term is not None and max(term.weight.values()) > 0:
            found[name] = term
    if not problems and not found:
        problems.append(f"{key} has no term with a weight above 0; nothing would be trained")
    if problems:
        raise ConfigError(*problems)
    return found


def _find_name_problems(key: str, name: Any, *, taken: Collection[str]) -> list[str]:
    """Returns why a term's values cannot be logged under its name."""
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
        return [f"{key} has a term named {name!r}; a name is text of letters, digits, '_', '-' and '.'"]
    if name in taken:
        return [f"{key}.{name}: a metric of this name is there already; name the term otherwise and give its function"]
    return []
