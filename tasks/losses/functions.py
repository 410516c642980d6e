"""The functions that a loss term may name, and their options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from tasks.losses.divergences import (
    cross_entropy,
    forward_kl,
    generalised_jsd,
    reverse_kl,
    skew_kl,
    skew_reverse_kl,
    total_variation,
)
from tasks.losses.top_tokens import TopTokens
from tasks.values import is_number, is_whole
from trainer import ConfigError, did_you_mean


class TokenLoss(Protocol):
    """The signature of a term's function; a user's own is named by its dotted path and may have more keywords."""

    def __call__(self, student: Tensor, teacher: Tensor | TopTokens, labels: Tensor, *, temperature: float) -> Tensor:
        """Returns one loss per token, (N,), from logits (N, V) in float32 and the right next tokens, (N,)."""


def _without_labels(divergence: Callable[..., Tensor]) -> TokenLoss:
    def loss(student: Tensor, teacher: Tensor | TopTokens, labels: Tensor, *, temperature: float) -> Tensor:
        return divergence(student, teacher, temperature=temperature)

    return loss


def _without_teacher(student: Tensor, teacher: Tensor | TopTokens, labels: Tensor, *, temperature: float) -> Tensor:
    return cross_entropy(student, labels)


_DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "generalised_jsd": generalised_jsd,
    "skew_kl": skew_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "total_variation": total_variation,
}
FUNCTIONS: dict[str, TokenLoss] = {
    **{name: _without_labels(divergence) for name, divergence in _DIVERGENCES.items()},
    "cross_entropy": _without_teacher,
}
# Option of a divergence: whether a value is right, and the rule in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "beta": (lambda value: is_number(value) and 0 <= value <= 1, "it must be a number from 0 to 1"),
    "skew": (lambda value: is_number(value) and 0 <= value < 1, "it must be a number from 0 to below 1"),
    "top_k": (
        lambda value: value is None or (is_whole(value) and value >= 1),
        "it must be a whole number of at least 1, or null for all tokens",
    ),
}


def find_function(name: Any, options: Mapping[str, Any] | None = None, *, beside: Sequence[str] = ()) -> TokenLoss:
    """Returns the loss of that name, or the user's callable at that dotted path, with the options bound to it.

    Raises one ConfigError with all that is wrong with them.

    Args:
        beside: Keys that stand beside the options, one of which a wrong option may mean.
    """
    options = options or {}
    if isinstance(name, str) and name in FUNCTIONS:
        divergence = _DIVERGENCES.get(name)
        keywords = _keywords(divergence, skipped=2) if divergence else {}
        wrong = [
            f"{key} is {options[key]!r}; {rule}"
            for key, (is_right, rule) in _RULES.items()
            if key in keywords and key in options and not is_right(options[key])
        ]
        _refuse(_unknown(name, options, keywords, beside) + wrong)
        return _without_labels(partial(divergence, **options)) if divergence and options else FUNCTIONS[name]
    function = _find_own(name)
    try:
        keywords = _keywords(function, skipped=3)
    except ValueError as error:  # some built-in functions have no signature
        raise ConfigError(f"{name} does not say what it takes; wrap it in a function of yours") from error
    _check_signature(name, function, {key: None for key, is_required in keywords.items() if is_required})
    missing = [
        f"{name} needs the option {key}, which is missing"
        for key, is_required in keywords.items()
        if is_required and key not in options
    ]
    _refuse(_unknown(name, options, keywords, beside) + missing)
    _check_signature(name, function, options)
    return partial(function, **options) if options else function


def accepts_top_tokens(name: str) -> bool:
    """Returns whether the function of that name is known to take a sparse teacher."""
    return name in FUNCTIONS


def _find_own(name: Any) -> Any:
    if not isinstance(name, str) or "." not in name or "" in name.split("."):
        hint = did_you_mean(str(name), FUNCTIONS)
        raise ConfigError(
            f"{name!r} is no loss function{hint}; use {', '.join(FUNCTIONS)}, or the dotted path of your own"
        )
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}") from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{name!r} is no function: {module_name} has no callable {attribute}")
    return function


def _check_signature(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError where a function cannot be called as a `TokenLoss` that is given its options."""
    try:
        inspect.signature(function).bind("student", "teacher", "labels", **{**options, "temperature": 1.0})
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called as a loss ({error}); it must take (student, teacher, labels, *, temperature) and "
            "return one loss per token"
        ) from error


_ANY = "**"  # no name of a parameter


def _keywords(function: Callable[..., Any], *, skipped: int) -> dict[str, bool]:
    """Returns which options a function has beyond the tensors it starts with, and whether each is required."""
    kinds = inspect.Parameter
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    taken = {*positional[:skipped], "temperature"}
    return {
        _ANY if parameter.kind is kinds.VAR_KEYWORD else parameter.name: (
            parameter.kind is not kinds.VAR_KEYWORD and parameter.default is kinds.empty
        )
        for parameter in parameters
        if parameter.name not in taken and parameter.kind not in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY)
    }


def _unknown(name: str, options: Mapping[str, Any], keywords: Mapping[str, bool], beside: Sequence[str]) -> list[str]:
    problems = []
    for key in options:
        if key in keywords or (_ANY in keywords and isinstance(key, str)):
            continue
        if not isinstance(key, str):
            problems.append(f"{key!r} is no option of {name}; options have names")
            continue
        has = f"it has {', '.join(keywords)}" if keywords else "it has none"
        problems.append(f"{key} is no option of {name}{did_you_mean(key, [*keywords, *beside])}; {has}")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)
