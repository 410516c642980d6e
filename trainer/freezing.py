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
    # With duplicates: of tied weights, such as lm_head and the embedding, either name may be meant.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    problems, frozen = [], []
    for pattern in patterns:
        matching = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            problems.append(_unmatched(pattern, parameters, key=key))
        frozen += [name for name in matching if name not in frozen]
    if problems:
        raise ConfigError(*problems)
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def _unmatched(pattern: str, parameters: Iterable[str], *, key: str) -> str:
    """Returns the problem of a pattern without a parameter, with the nearest names, each layer's once."""
    by_shape = {re.sub(r"\.\d+\.", ".*.", name): name for name in reversed(list(parameters))}
    nearest = difflib.get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), by_shape, n=3, cutoff=0.0)
    found = ", ".join(by_shape[shape] for shape in nearest)
    return f"{key}: {pattern!r} matches no parameter; nearest: {found}; {key}=[] trains all of the model"
