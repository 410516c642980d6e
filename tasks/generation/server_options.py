"""What a configuration says of a server that writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from tasks.values import find_unknown_keys, is_number, is_whole
from trainer import ConfigError

DIALECTS = ("vllm", "openai")
SERVER_PLACE = tuple(  # where a server is and how it is asked, of a task's keys; what it is told decides what it writes
    f"generation.server.{name}"
    for name in ("url", "model", "api_key_env", "timeout_seconds", "retries", "connections", "weights_folder")
)
LONGEST_TRY = 86400.0  # seconds, a day: a socket takes no time of any length


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server that speaks the OpenAI-compatible completions protocol.

    Args:
        url: Such as http://localhost:8000; a /v1 at its end is left out.
        model: The name that the server gives to the model.
        api_key_env: The environment variable that holds the key, where one is needed.
        timeout_seconds: Of one try of one request.
        retries: Tries after the first, each after twice the wait.
        connections: Requests of a rank at a time.
        dialect: "vllm" also sends what only vLLM knows: top_k, min_p, and the wish for token ids; "openai" does not.
        weights_folder: Where a trained model's weights are written for the server to load again; both see it.
    """

    url: str
    model: str
    api_key_env: str | None = None
    timeout_seconds: float = 600.0
    retries: int = 4
    connections: int = 16
    dialect: str = "vllm"
    weights_folder: str | None = None


def read_server(values: Mapping[str, Any] | None, *, key: str = "task.generation.server") -> ServerOptions | None:
    """Returns the server of a mapping, None for none, or raises ConfigError with all that is wrong with it.

    Args:
        key: Where it stands, for people.
    """
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values!r}: must be null or a mapping, such as {{url: ..., model: ...}}")
    known = [item.name for item in fields(ServerOptions)]
    problems = find_unknown_keys(key, values, known)
    problems += [f"{key}.{name} is missing" for name in ("url", "model") if name not in values]
    problems += [text for name, value in values.items() for text in _find_problem(f"{key}.{name}", name, value)]
    if problems:
        raise ConfigError(*problems)
    given = dict(values)
    given["url"] = given["url"].rstrip("/").removesuffix("/v1")
    return ServerOptions(**given)


def find_folder_problems(server: ServerOptions | None, model: str, trainable: Mapping[str, bool]) -> list[str]:
    """Returns whether a trained model is to be written for by a server that would never see its weights.

    Args:
        model: Name of the one that the server writes as.
        trainable: As in `TaskModule.check_models`.
    """
    if server is None or server.weights_folder is not None or not trainable.get(model, False):
        return []
    problem = (
        f"task.generation.server.weights_folder is null, but models.{model} is trained: the server would go on writing "
        "as it began; give a folder that both see, and serve the model from it"
    )
    return [problem]


def _find_problem(key: str, name: str, value: Any) -> list[str]:
    shown = f"{key}={value!r}: must be"
    if name == "url":
        return _find_address_problem(key, value)
    if name == "model" and not (isinstance(value, str) and value):
        return [f"{shown} the name of a model at the server, as its /v1/models has it"]
    if name == "api_key_env" and value is not None and not (isinstance(value, str) and value in os.environ):
        return [f"{key} must name an environment variable that holds the key, and there is none of that name here"]
    if name == "timeout_seconds" and not (is_number(value) and 0 < value <= LONGEST_TRY):
        return [f"{shown} a number above 0, at most {LONGEST_TRY:g}"]
    if name == "retries" and not (is_whole(value) and value >= 0):
        return [f"{shown} a whole number of at least 0"]
    if name == "connections" and not (is_whole(value) and value >= 1):
        return [f"{shown} a whole number of at least 1"]
    if name == "dialect" and value not in DIALECTS:
        return [f"{shown} one of {', '.join(DIALECTS)}"]
    if name == "weights_folder" and value is not None and not (isinstance(value, str) and value):
        return [f"{shown} null or a folder that this machine and the server's both see"]
    return []


def _find_address_problem(key: str, value: Any) -> list[str]:
    rule = "must be an address such as http://localhost:8000"
    if not isinstance(value, str):
        return [f"{key}={value!r}: {rule}"]
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        return [f"{key}: {rule}"]
    if parts.username is not None or parts.password is not None:
        return [f"{key} holds a user or a password; {rule}, and api_key_env names the variable that holds the key"]
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return [f"{key}={value!r}: {rule}"]
    return []
