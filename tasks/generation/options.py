"""What a configuration says of how text is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tasks.generation.server_options import ServerOptions, read_server
from tasks.values import find_unknown_keys, is_number, is_whole
from trainer import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How answers are written; the filters apply in this order, each to what the one before it has left.

    Args:
        max_new_tokens: Where an answer is cut.
        temperature: Logits are divided by it before they are drawn from; 0: the most likely token each time.
        top_k: Only so many of the most likely tokens are drawn from; 0: all.
        top_p: Only the least set of tokens with so much probability is drawn from; 1: all.
        min_p: Only tokens with at least this share of the most likely token's probability are drawn from; 0: all.
        stop: Texts that end an answer, which holds the tokens up to and with the one that completes such a text.
        server: What writes in the model's place; None: the model itself.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    server: ServerOptions | None = None


def greedy(options: GenerationOptions) -> GenerationOptions:
    """Returns the same, with the most likely token each time."""
    return replace(options, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def read_options(values: Mapping[str, Any], *, key: str = "task.generation") -> GenerationOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it.

    Args:
        key: Where it stands, for people.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values!r}: must be a mapping, such as {{max_new_tokens: 64, temperature: 1.0}}")
    given = dict(values)
    known = [item.name for item in fields(GenerationOptions)]
    problems = find_unknown_keys(key, given, known)
    problems += [problem for name, value in given.items() for problem in _find_problem(f"{key}.{name}", name, value)]
    try:
        given["server"] = read_server(given.get("server"), key=f"{key}.server")
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    given["stop"] = tuple(given.get("stop") or ())
    options = GenerationOptions(**given)
    if options.server is not None and options.server.dialect == "openai" and (options.top_k or options.min_p):
        raise ConfigError(
            f"{key}.top_k and {key}.min_p are not in OpenAI's protocol, and a server of {key}.server.dialect=openai "
            "leaves them out; set both to 0, or the dialect to vllm"
        )
    return options


def _find_problem(key: str, name: str, value: Any) -> list[str]:
    shown = f"{key}={value!r}: must be"
    if name == "max_new_tokens" and not (is_whole(value) and value >= 1):
        return [f"{shown} a whole number of at least 1"]
    if name == "temperature" and not (is_number(value) and value >= 0):
        return [f"{shown} a finite number of at least 0; 0 is greedy"]
    if name == "top_p" and not (is_number(value) and 0 < value <= 1):
        return [f"{shown} a number above 0, at most 1; 1 draws from all tokens"]
    if name == "top_k" and not (is_whole(value) and value >= 0):
        return [f"{shown} a whole number of at least 0; 0 draws from all tokens"]
    if name == "min_p" and not (is_number(value) and 0 <= value < 1):
        return [f"{shown} a number of at least 0, below 1; 0 draws from all tokens"]
    if name == "stop" and not _is_list_of_texts(value):
        return [f"{shown} a list of texts that are not empty, such as ['\\n\\n']"]
    return []


def _is_list_of_texts(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        return False
    return all(isinstance(text, str) and text for text in value)
