"""Choices from groups: which words of a command line are some, and what is wrong with them."""

from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from trainer.conf_files import Request, conf_dir, file_problems, loader, options_of, try_compose
from trainer.words import listed, nearest

LIST_GROUPS = ("logger", "callbacks")  # take several options: logger=[jsonl,wandb]
_WHOLE_GROUPS = ("task", "experiment", "debug")  # without one of these, the rest is another run


def is_group(override: Override) -> bool:
    """Returns whether an override chooses from a group, rather than set a key."""
    group = group_of(override)
    if override.package is not None or "/" in group:
        return True
    if not override.is_delete() and isinstance(override.value(), dict):
        return False  # `task={...}` sets keys
    return "." not in group and (group in loader().list_groups("") or group in _groups(conf_dir()))


def group_of(override: Override) -> str:
    """Returns the group of a choice, without its package."""
    return str(override.key_or_group)


def key_of(line: str) -> str:
    """Returns the left side of an override, without the signs before it."""
    return line.lstrip("+~").partition("=")[0]


def spell_null(override: Override) -> str:
    """Hydra refuses `group=null` on the command line; `~group` and `group=[]` are its words for none."""
    line = str(override.input_line)
    if not is_group(override) or override.is_delete() or override.value() is not None:
        return line
    key = line.partition("=")[0].lstrip("+")
    return f"{key}=[]" if key in LIST_GROUPS else f"~{key}"


def without_callbacks(chosen: list[Override], base: DictConfig) -> Iterator[str]:
    """`callbacks=null` means none, not even those that the task lists itself."""
    for override in chosen:
        group = group_of(override)
        if group in LIST_GROUPS and not override.is_delete() and override.value() is None:
            yield from (f"~{group}.{name}" for name in base[group])


def all_groups() -> list[str]:
    """Returns the names of the groups that a user may choose from."""
    groups = [group for group in loader().list_groups("") if group not in ("hydra", "local")]
    return [
        name for group in groups for name in (group, *(f"{group}/{inner}" for inner in loader().list_groups(group)))
    ]


def compose_groups(request: Request, chosen: list[str]) -> tuple[list[str], DictConfig | None, list[str], bool]:
    """Returns the group choices that hold, what they compose to, problems, and whether nothing had to be left out."""
    cfg, error = try_compose(request.config_name, chosen)
    if error is None:
        return chosen, cfg, [], True
    plain, error = try_compose(request.config_name, [])
    if plain is None:
        assert error is not None
        return [], None, file_problems(request.config_name, request.folders, [], error), False
    good: list[str] = []
    problems: list[str] = []
    intact = True
    for line in chosen:
        cfg, error = try_compose(request.config_name, [*good, line])
        if error is None:
            good.append(line)
            continue
        text, guess = _group_problem(
            line, choices=_choices(plain if not good else try_compose(request.config_name, good)[0])
        )
        problems += (
            [f"{line}: {text}"] if text else file_problems(request.config_name, request.folders, [*good, line], error)
        )
        # The rest is judged as if the nearest name had been given: one misspelt word is one problem.
        if guess and try_compose(request.config_name, [*good, guess])[1] is None:
            good.append(guess)
        else:
            intact = intact and text is not None and key_of(line) not in _WHOLE_GROUPS
    return good, try_compose(request.config_name, good)[0], problems, intact


def _choices(cfg: DictConfig | None) -> list[str]:
    assert cfg is not None
    return [key for key in cfg.hydra.runtime.choices if not key.startswith("hydra/")]


def _group_problem(line: str, *, choices: list[str]) -> tuple[str | None, str | None]:
    """Returns what is wrong with a group choice and the line that was meant; (None, None): its file is wrong."""
    key, _, value = line.lstrip("+~").partition("=")
    group, package = key.partition("@")[::2]
    if not options_of(group):
        if group in _groups(conf_dir()):
            return _saved_text(group), None
        near = nearest(group, all_groups())
        guess = line.replace(group, near, 1) if near else None
        return f"there is no group {group}{f'; did you mean {near}?' if near else listed(all_groups())}", guess
    known = [choice for choice in choices if choice.partition("@")[0] == group]
    if not known and "/" in group and not line.startswith("+"):
        return f"the task that is chosen has nothing of group {group}; drop it", None
    if known and key not in known and not line.startswith("+"):
        near = nearest(key, known)
        text = f"nothing is chosen by {key}; did you mean {' or '.join([near] if near and package else known)}?"
        return text, line.replace(key, near, 1) if near and package else None
    return _option_problem(line, group, value)


def _option_problem(line: str, group: str, value: str) -> tuple[str | None, str | None]:
    for option in (word.strip(" '\"") for word in value.strip("[]").split(",")):
        parent, _, name = f"{group}/{option}".rpartition("/")
        if option and name not in options_of(parent):
            near = nearest(option, options_of(group))
            hint = f"; did you mean {near}?" if near else ""
            guess = line.replace(option, near, 1) if near else None
            return f"there is no {option} in group {group}{hint}{listed(options_of(group))}", guess
    return None, None


def _saved_text(group: str) -> str:
    keys = {
        "logger": "drop one with ~logger.wandb",
        "callbacks": "drop one with ~callbacks.progress",
        "data": "set its keys, such as data.train=...",
    }
    hint = keys.get(group, "set the keys themselves, such as models.<name>.plugin.zero_optimization.stage=3")
    return f"a saved configuration has no groups to choose from; {hint}, or start again from task=..."


def _groups(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir() and not path.name.startswith("_")
    }
