"""Reads `task.rewards`: what each is computed by, and all that is wrong with it before anything is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.rewards.functions import brevity, contains_answer, exact_answer, matches
from tasks.values import is_single, is_whole
from trainer import ConfigError, TargetError, did_you_mean, find_target

RewardFunction = Callable[..., Sequence[float | None]]

FUNCTIONS: dict[str, RewardFunction] = {
    "exact_answer": exact_answer,
    "contains_answer": contains_answer,
    "brevity": brevity,
    "matches": matches,
}
GIVEN = ("prompts", "completions", "completion_ids")  # what a function gets besides columns and its own arguments
_KEYS = ("function", "model", "weight")
_KINDS = inspect.Parameter


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One part of the reward of an answer.

    Args:
        name: Its key in `task.rewards`, under which it is logged.
        function: None of a model.
        model: The name of a reward model; None of a function.
        arguments: The function's own, from the configuration.
        takes: Which of GIVEN and of the columns the function takes; None: all there are.
        needs: Those columns that it cannot do without.
    """

    name: str
    weight: float = 1.0
    function: RewardFunction | None = None
    model: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    takes: frozenset[str] | None = None
    needs: tuple[str, ...] = ()


def read_reward_mapping(values: Any, *, key: str = "task.rewards") -> dict[str, Reward]:
    """Returns the rewards by name, or raises one ConfigError with everything that is wrong in them.

    Args:
        values: Name to {function | model, weight, the function's own arguments}; the function is the reward's name
            unless it is given. None: a reward of a preset that is left out.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{key} is {values!r}; it must be a mapping, {{<name>: {{function: <function>, weight: 1.0}}}}"
        )
    found: dict[str, Reward] = {}
    problems: list[str] = []
    for name, given in values.items():
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
            problems.append(f"{key} has a reward named {name!r}; a name is text of letters, digits, '_', '-' and '.'")
        elif given is None:
            continue
        elif not isinstance(given, Mapping):
            problems.append(
                f"{key}.{name} is {given!r}; it must be a mapping such as {{function: brevity, weight: 1.0}}"
            )
        else:
            reward, own = _read(f"{key}.{name}", name, given)
            problems += own
            if reward is not None:
                found[name] = reward
    if not problems and not any(reward.weight for reward in found.values()):
        problems.append(f"{key} has no reward with a weight other than 0; nothing would be learnt")
    if problems:
        raise ConfigError(*problems)
    return found


def find_model_problems(
    rewards: Mapping[str, Reward], trainable: Mapping[str, bool], *, key: str = "task.rewards"
) -> list[str]:
    """Returns what is wrong with the models that give rewards; arguments as in `TaskModule.check_models`."""
    problems = []
    for name, reward in rewards.items():
        model = reward.model
        if model is not None and model not in trainable:
            near = did_you_mean(model, trainable) or f", only {', '.join(trainable)}"
            problems.append(f"{key}.{name}.model={model}: models has no {model}{near}")
        elif model is not None and trainable[model]:
            problems.append(f"models.{model}.trainable=true, but {key}.{name} is given by it; set it to false")
    return problems


def find_column_problems(
    rewards: Mapping[str, Reward], columns: Collection[str], *, data: str, key: str = "task.rewards"
) -> list[str]:
    """Returns which reward needs a column that the rows have not.

    Args:
        data: The key of the rows.
    """
    asked = [
        f"{key}.{name}.function takes 'prompt', which no function is given; name it prompts: the list of their texts"
        for name, reward in rewards.items()
        if "prompt" in reward.needs
    ]
    return asked + [
        f"{key}.{name}.function needs the column '{needed}', and the rows of {data} have only {', '.join(columns)}"
        f"{did_you_mean(needed, columns)}"
        for name, reward in rewards.items()
        for needed in reward.needs
        if needed not in columns and needed != "prompt"
    ]


def _read(key: str, name: str, given: Mapping[str, Any]) -> tuple[Reward | None, list[str]]:
    problems = []
    weight = given.get("weight", 1.0)
    if not is_single(weight):
        problems.append(f"{key}.weight is {weight!r}; it must be a finite number, and one that a float32 holds")
    arguments = {str(word): value for word, value in given.items() if word not in _KEYS}
    model = given.get("model")
    if model is not None:
        if given.get("function") is not None:
            problems.append(f"{key} has both function and model; a reward is given by one of them")
        if not (isinstance(model, str) and model):
            problems.append(f"{key}.model is {model!r}; it must be the name of a model")
        problems += [f"{key}.{word} is no key of a model's reward; it has model and weight" for word in arguments]
        return (None if problems else Reward(name=name, weight=float(weight), model=model)), problems
    function, problem = _find_function(given.get("function", name))
    if function is None:
        return None, [*problems, f"{key}.function={given.get('function', name)}: {problem}"]
    signature, own = _read_signature(key, function, arguments)
    problems += own
    if problems:
        return None, problems
    return Reward(name=name, weight=float(weight), function=function, arguments=arguments, **signature), []


def _find_function(name: Any) -> tuple[RewardFunction | None, str]:
    if isinstance(name, str) and name in FUNCTIONS:
        return FUNCTIONS[name], ""
    if not isinstance(name, str) or "." not in name:
        near = did_you_mean(str(name), FUNCTIONS)
        return None, f"no reward function{near}; use {', '.join(FUNCTIONS)}, or the dotted path of your own"
    try:
        found = find_target(name)
    except TargetError as error:
        return None, str(error)
    return (found, "") if callable(found) else (None, "not a function")


def _read_signature(
    key: str, function: RewardFunction, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns what the function takes and needs, and what is wrong with the arguments that it is given."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError) as error:
        return {}, [f"{key}.function does not say what it takes ({error}); wrap it in a function of yours"]
    named = {
        word: parameter
        for word, parameter in parameters.items()
        if parameter.kind in (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is _KINDS.VAR_KEYWORD for parameter in parameters.values())
    problems = [
        f"{key}.function: its parameter {word} cannot be given by name; it must take completions and columns by name"
        for word, parameter in parameters.items()
        if parameter.kind is _KINDS.POSITIONAL_ONLY and parameter.default is _KINDS.empty
    ]
    if inspect.iscoroutinefunction(function):
        problems.append(f"{key}.function is a coroutine; it must return the rewards")
    own = [word for word in named if word not in GIVEN]
    for word in arguments:
        if word in GIVEN:
            problems.append(f"{key}.{word}: the task gives this one itself; drop it")
        elif word not in named and not takes_any:
            problems.append(
                f"{key}.{word}: the function has no such parameter{did_you_mean(word, [*own, *_KEYS])}; it has "
                f"{', '.join(own) or 'none of its own'}"
            )
    if function is matches and not problems:
        problems += _find_pattern_problem(key, arguments)
    if function is brevity and not problems:
        words, most = arguments.get("words", 1), arguments.get("most", 9)
        if not (is_whole(words) and is_whole(most) and 1 <= words < most):
            problems.append(f"{key}: words={words!r} and most={most!r} must be whole numbers, 1 <= words < most")
    needs = tuple(
        word
        for word, parameter in named.items()
        if parameter.default is _KINDS.empty and word not in (*GIVEN, *arguments)
    )
    takes = None if takes_any else frozenset(word for word in named if word not in arguments)
    return {"takes": takes, "needs": needs}, problems


def _find_pattern_problem(key: str, arguments: Mapping[str, Any]) -> list[str]:
    pattern = arguments.get("pattern")
    if not isinstance(pattern, str):
        return [f"{key}.pattern is {'missing' if pattern is None else repr(pattern)}; give a regular expression"]
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"{key}.pattern={pattern}: no regular expression ({error})"]
    return []
