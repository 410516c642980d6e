"""Takes parameters of a model out of training, by name."""

import difflib
import fnmatch
import re
from collections.abc import Iterable

from torch import nn

from trainer.config import ConfigError


def freeze(module: nn.Module, patterns: list[str], *, key: str = "freeze") -> list[str]:
    """Takes the parameters whose name matches a glob out of training and returns their names.

    Args:
        key: Where the globs stand in the configuration, for messages.
    """
    parameters = _parameters(module)
    problems = find_unmatched(module, patterns, key=key)
    if problems:
        raise ConfigError(*problems)
    frozen = list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(parameters, pattern)))
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def find_unmatched(module: nn.Module, patterns: list[str], *, key: str = "freeze") -> list[str]:
    """Returns the problems of globs that match no parameter of a module, which may be on the meta device."""
    parameters = _parameters(module)
    return [_unmatched(p, parameters, key=key) for p in patterns if not fnmatch.filter(parameters, p)]


def find_freezing_problems(module: nn.Module, patterns: list[str], *, key: str) -> list[str]:
    """Returns the same of a model that is not built yet, which is changed, and that they freeze all of it."""
    problems = find_unmatched(module, patterns, key=key)
    if not problems:
        freeze(module, patterns)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            problems.append(f"{key}={patterns} freezes every parameter; drop some, or set trainable=false")
    return problems


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    # With duplicates: of tied weights, such as lm_head and the embedding, either name may be meant.
    return dict(module.named_parameters(remove_duplicate=False))


def _unmatched(pattern: str, parameters: Iterable[str], *, key: str) -> str:
    """Returns the problem of a pattern without a parameter, with the nearest names, of layers the last one's."""
    by_shape = {re.sub(r"\.\d+\.", ".*.", name): name for name in parameters}
    nearest = difflib.get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), by_shape, n=3, cutoff=0.0)
    found = ", ".join(by_shape[shape] for shape in nearest)
    return f"{key}: {pattern!r} matches no parameter; nearest: {found}; {key}=[] trains all of the model"
