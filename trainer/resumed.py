"""The configuration of a resumed run: the checkpoint's own, and over it what the command line chooses from groups."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.conf_files import Request, loader, options_of, try_compose
from trainer.conf_groups import compose_groups, group_of, spell_null
from trainer.saved import show
from trainer.words import first_line, listed

NAME = "resumed_run"  # under which Hydra finds it
_ABSENT = object()


@dataclass(kw_only=True)
class Saved:
    """The configuration in a checkpoint."""

    content: dict[str, Any]  # of its file, with Hydra's part
    cfg: DictConfig
    task: str


@dataclass(kw_only=True)
class Laid:
    """The same with choices from groups over it."""

    cfg: DictConfig | None
    lines: list[str] = field(default_factory=list)  # the choices that hold
    problems: list[str] = field(default_factory=list)
    intact: bool = True  # whether nothing had to be left out


def read_saved(path: Path) -> Saved | str:
    """Returns the configuration of a checkpoint, or what is wrong with its file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        task = str(content["hydra"]["job"]["name"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        return f"{show(path)}: is no configuration of a run ({type(error).__name__}: {first_line(error)})"
    cfg, problem = _compose(content)
    return Saved(content=content, cfg=cfg, task=task) if cfg is not None else f"{show(path)}: {problem}"


def _compose(content: Mapping[str, Any]) -> tuple[DictConfig | None, str]:
    ConfigStore.instance().store(name=NAME, node=OmegaConf.create(dict(content)))
    cfg, error = try_compose(NAME, [])
    return cfg, "" if error is None else first_line(error.__cause__ or error)


def lay_choices(saved: Saved, chosen: list[Override], request: Request) -> Laid:
    """Returns the saved configuration in which each chosen node is that of the group's option.

    An option that sets keys all over, such as an experiment, counts with those that it changes.
    """
    problems = [
        f"{choice.input_line}: the run that is resumed trains {saved.task}; drop it, or start a new run"
        for choice in chosen
        if group_of(choice) == "task" and (choice.is_delete() or choice.value() != saved.task)
    ]
    others = [choice for choice in chosen if group_of(choice) != "task" and not group_of(choice).startswith("hydra/")]
    lines = [spell_null(choice) for choice in others]
    if not lines:
        return Laid(cfg=saved.cfg, problems=problems)
    tasks = options_of("task")  # none in a saved configuration, which has no groups
    if tasks and saved.task not in tasks:
        text = f"there is no {saved.task}, the task of the run that is resumed, in group task{listed(tasks)}"
        problems.append(f"{' '.join(lines)}: {text}; give --config-dir as for that run")
        return Laid(cfg=saved.cfg, problems=problems)
    task = [f"task={saved.task}"] if tasks else []
    good, base, found, intact = compose_groups(request, [*task, *lines])
    problems += found
    if base is None:
        return Laid(cfg=None, problems=problems)
    lines = [line for line in good if line not in task]
    content = _laid(saved.content, base, request.config_name, good, lines)
    cfg, problem = _compose(content)
    return Laid(cfg=cfg, lines=lines, problems=[*problems, *([problem] if problem else [])], intact=intact)


def _laid(
    saved: dict[str, Any], base: DictConfig, config_name: str, good: list[str], lines: list[str]
) -> dict[str, Any]:
    """Returns the content with the nodes of the choices, and with the keys that those for all nodes change."""
    content: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(saved), resolve=False)  # type: ignore[assignment]
    new = _plain(base)
    packages = {line: _packages(line, config_name, good) for line in lines}
    for package in (package for found in packages.values() for package in found if package):
        path = tuple(package.split("."))
        if (node := _get(new, path)) is not _ABSENT:
            _set(content, path, node)
    everywhere = [line for line, found in packages.items() if "" in found]
    without, _ = try_compose(config_name, [line for line in good if line not in everywhere])
    if everywhere and without is not None:
        before, after = dict(_leaves(_plain(without))), dict(_leaves(new))
        for path in before.keys() - after.keys():
            _drop(content, path)
        for path, value in after.items():
            if before.get(path, _ABSENT) != value:
                _set(content, path, value)
    return content


def _packages(line: str, config_name: str, good: list[str]) -> set[str]:
    """Returns where the options of a choice lie in the configuration; "" for the whole of it."""
    key, _, value = line.lstrip("+~").partition("=")
    group, _, package = key.partition("@")
    if package:
        return {"" if package == "_global_" else package}
    options = {f"{group}/{option.strip()}" for option in value.strip("[]").split(",")}
    defaults = loader().compute_defaults_list(config_name, good, RunMode.RUN).defaults
    found = {
        default.package or ""
        for default in defaults
        if default.override_key == key or (default.override_key is None and default.config_path in options)
    }
    return found or {group.replace("/", ".")}


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    del plain["hydra"]
    return plain


def _leaves(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _get(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return _ABSENT
        node = node[key]
    return node


def _set(node: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[path[-1]] = value


def _drop(node: dict[str, Any], path: tuple[str, ...]) -> None:
    parent = _get(node, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1], None)
