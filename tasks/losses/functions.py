"""The functions that a loss term may name."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, Protocol

from torch import Tensor

from tasks.losses.divergences import cross_entropy, forward_kl, reverse_kl
from trainer import ConfigError


class TokenLoss(Protocol):
    """The signature of a term's function; a user's own is named by its dotted path."""

    def __call__(self, student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
        """Returns one loss per token, (N,), from logits (N, V) in float32 and the right next tokens, (N,)."""


FUNCTIONS: dict[str, TokenLoss] = {
    "forward_kl": lambda student, teacher, labels, *, temperature: forward_kl(
        student, teacher, temperature=temperature
    ),
    "reverse_kl": lambda student, teacher, labels, *, temperature: reverse_kl(
        student, teacher, temperature=temperature
    ),
    "cross_entropy": lambda student, teacher, labels, *, temperature: cross_entropy(student, labels),
}


def find_function(name: Any) -> TokenLoss:
    """Returns the loss of that name, or the user's callable at that dotted path."""
    if isinstance(name, str) and name in FUNCTIONS:
        return FUNCTIONS[name]
    if not isinstance(name, str) or "." not in name or "" in name.split("."):
        near = difflib.get_close_matches(str(name), FUNCTIONS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{name!r} is no loss function; {hint}use {', '.join(FUNCTIONS)}, or the dotted path of your own"
        )
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}") from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{name!r} is no function: {module_name} has no callable {attribute}")
    return function  # type: ignore[no-any-return]
