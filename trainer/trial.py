"""Makes a configuration's small objects once, before anything is started, to hear what their constructors refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from hydra.errors import InstantiationException
from torch import nn

from trainer.build import make
from trainer.callbacks.callback import Callback, check_hook_names
from trainer.config import ConfigError, data_nodes
from trainer.loggers.logger import Logger
from trainer.plugin_keys import AUTO
from trainer.targets import find_target, how_raised
from trainer.task import TaskModule, find_task_problems

Config = Mapping[str, Any]

_MANY_UPDATES = 10**6  # of a run whose length is not known yet
_CHEAP = ("torch.", "trainer.")  # DeepSpeed's optimizers compile kernels, a user's may want real weights


def trial_problems(config: Config, found: list[str]) -> list[str]:
    """Returns what the constructors of task, callbacks, loggers, optimizers and schedulers refuse.

    Args:
        found: Problems that are known; a node that has one is not made.
    """
    problems: list[str] = []
    for key, node, kind in _nodes(config):
        if _is_sound(key, node, found):
            problems += _try_one(key, node, kind)
    for name, model in config["models"].items():
        if not any(problem.startswith(f"models.{name}.") for problem in found):
            problems += _try_optimizer(name, model, config["trainer"]["max_steps"])
    if not problems and not found and _is_sound("task", config["task"], found):
        problems += _try_roles(config)
    return problems


def _nodes(config: Config) -> Iterator[tuple[str, Any, type]]:
    yield "task", config["task"], TaskModule
    for group, kind in (("callbacks", Callback), ("logger", Logger)):
        for name, node in (config[group] or {}).items():
            yield f"{group}.{name}", node, kind


def _is_sound(key: str, node: Any, found: list[str]) -> bool:
    """Returns whether a node can be made cheaply: nothing is wrong with it, and no other object stands inside."""
    if not isinstance(node, Mapping) or any(problem.startswith(key) for problem in found):
        return False
    return not any(_holds_target(child) for child in node.values())


def _holds_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_holds_target(child) for child in value.values())
    return isinstance(value, list) and any(_holds_target(child) for child in value)


def _try_one(key: str, node: Config, kind: type) -> list[str]:
    made, problems = _make(key, node)
    if problems:
        return problems
    if not isinstance(made, kind):
        return [f"{key}._target_={node['_target_']}: makes no trainer.{kind.__name__}; derive from it"]
    if kind is not Logger:
        try:
            check_hook_names(type(made), base=kind)
        except TypeError as error:
            return [f"{key}._target_={node['_target_']}: {error}"]
    return []


def _make(key: str, node: Config, **arguments: Any) -> tuple[Any, list[str]]:
    try:
        return make(node, **arguments), []
    except ConfigError as error:
        return None, error.problems
    except InstantiationException as error:
        return None, [f"{key}: {node['_target_']} {how_raised(error.__cause__ or error)}"]
    except SystemExit as error:
        return None, [f"{key}: {node['_target_']} {how_raised(error)}"]


def _try_optimizer(name: str, model: Config, max_steps: int | None) -> list[str]:
    optimizer, scheduler = model["optimizer"], model["scheduler"]
    made: Any = torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1, momentum=0.9)
    if _is_cheap(optimizer):
        made, problems = _make(f"models.{name}.optimizer", optimizer, params=[nn.Parameter(torch.zeros(2, 2))])
        if problems:
            return problems
    if not _is_cheap(scheduler):
        return []
    filled = {key: max_steps or _MANY_UPDATES if value == AUTO else value for key, value in scheduler.items()}
    return _make(f"models.{name}.scheduler", filled, optimizer=made)[1]


def _is_cheap(node: Config | None) -> bool:
    if not node or _holds_target([value for key, value in node.items() if key != "_target_"]):
        return False
    return str(getattr(find_target(node["_target_"]), "__module__", "")).startswith(_CHEAP)


def _try_roles(config: Config) -> list[str]:
    trainable = {name: bool(model["trainable"]) for name, model in config["models"].items()}
    own_data = [name for name, model in config["models"].items() if model["data"]]
    adapted = [name for name, model in config["models"].items() if model["lora"]]
    window = config["trainer"]["gradient_accumulation_steps"]
    return find_task_problems(
        make(config["task"]),
        trainable=trainable,
        own_data=own_data,
        stage=config["mode"],
        adapted=adapted,
        targets={name: str((model["build"] or {}).get("_target_", "")) for name, model in config["models"].items()},
        packed=[key for key, data in data_nodes(config) if data["packing"]],
        accumulation={n: model["gradient_accumulation_steps"] or window for n, model in config["models"].items()},
    )
