"""Values of keys: applied one by one where they do not go together, each wrong one named."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
)

from trainer.conf_files import NULL_ERRORS, try_compose
from trainer.conf_groups import all_groups
from trainer.saved import node_of
from trainer.words import did_you_mean, first_line, names_below

# Where a key that the YAML does not list may be set without `+`; check.py holds it against the target's signature.
_FREE = re.compile(
    r"((?P<root>models\.[^.=]+)\.(build|plugin|optimizer|scheduler|lora)|(?P<node>(callbacks|logger)\.[^.=]+)|"
    r"(?P<task>task)|(?P<data>(models\.[^.=]+\.)?data)\.(train|validation|rows|collate))(\.|=\{)"
)


def open_free_key(override: str, base: DictConfig) -> str:
    """Puts `++` before a key that a node of `base` takes without listing it, such as a constructor's argument."""
    match = _FREE.match(override)
    if match is None or "=" not in override:
        return override
    root = next(name for name in match.group("root", "node", "task", "data") if name)
    known = OmegaConf.select(base, root, default=None, throw_on_missing=False) is not None
    is_new_node = bool(match["node"]) and "_target_" in override
    return f"++{override}" if known or is_new_node else override


def compose_values(
    config_name: str, groups: list[str], values: list[str], base: DictConfig
) -> tuple[list[str], DictConfig, list[str]]:
    """Returns the overrides that hold, what they compose to, and what is wrong with the others.

    Args:
        base: What the choices from groups compose to.
    """
    cfg, error = (base, None) if not values else try_compose(config_name, groups + values)
    if cfg is not None:
        return groups + values, cfg, []
    good, problems, last = list(groups), [], base
    for value in values:
        cfg, error = try_compose(config_name, [*good, value])
        if error is None and cfg is not None:
            good.append(value)
            last = cfg
        elif error is not None:
            problems.append(_value_problem(value, error, last))
    return good, last, problems


def _value_problem(line: str, error: Exception, cfg: DictConfig) -> str:
    written = line.removeprefix("++")
    key = line.lstrip("+~").partition("=")[0]
    cause = error.__cause__ or error
    known = [*names_below(cfg), *all_groups()]
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return f"{written}: there is no such key{did_you_mean(key, known)}{_new_model_text(key, cfg)}"
    if isinstance(cause, NULL_ERRORS):
        return f"{written}: {_null_text(key, cfg)}"
    hint = did_you_mean(key, known) if OmegaConf.select(cfg, key, default=None) is None and key not in known else ""
    return f"{written}: {first_line(cause)}{hint}"


def _new_model_text(key: str, cfg: DictConfig) -> str:
    """Returns how a model that the configuration does not have is added, where the key is one of such a model."""
    root, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    models = list(cfg.models)
    if root != "models" or not rest or name in models:
        return ""
    added = f"+model@models.{name}.build=<model> +plugin@models.{name}.plugin=<plugin>"
    return f"; the models are {', '.join(models)}, and another one is added by {added}"


def _null_text(key: str, cfg: DictConfig) -> str:
    parts = key.split(".")
    heads = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    null = next((head for head in heads if OmegaConf.select(cfg, head, default=None) is None), key)
    group = null.rpartition(".")[2]
    hint = f"; choose one first: {group}@{null}=..." if null.startswith("models.") else ""
    return f"{null} is null, so it has no keys{hint}"


def untyped_keys(cfg: DictConfig) -> Iterator[str]:
    """`+` lets a key into a typed node; nothing would ever read it."""
    for name, parent, key in nodes(cfg):
        kind = OmegaConf.get_type(parent)
        if isinstance(kind, type) and is_dataclass(kind):
            known = [item.name for item in fields(kind)]
            if key not in known:
                prefix = name.removesuffix(str(key))
                yield f"{name}: there is no such key{did_you_mean(name, [prefix + other for other in known])}"


def unresolvable(cfg: DictConfig) -> Iterator[str]:
    """Yields the references that lead nowhere, and each value that is missing where they lead, once."""
    missing: set[str] = set()
    for name, parent, key in nodes(cfg):
        if OmegaConf.is_interpolation(parent, key):
            try:
                parent[key]
            except InterpolationToMissingValueError as error:
                absent = first_line(error).rpartition(": ")[2]
                if absent not in missing:
                    missing.add(absent)
                    yield f"{absent} is missing; give it: {absent}=..."
            except OmegaConfBaseException as error:
                yield f"{name}={node_of(parent, key)._value()}: {first_line(error)}"


def nodes(cfg: DictConfig | ListConfig, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, parent, key) of every entry below a node, Hydra's own left out."""
    if cfg._is_none() or cfg._is_missing() or cfg._is_interpolation():
        return
    keys: Iterable[Any] = cfg if isinstance(cfg, DictConfig) else range(len(cfg))
    for key in keys:
        if prefix or key != "hydra":
            yield f"{prefix}{key}", cfg, key
            child = node_of(cfg, key)
            if isinstance(child, DictConfig | ListConfig):
                yield from nodes(child, f"{prefix}{key}.")
