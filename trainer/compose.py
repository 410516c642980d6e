"""Composes a run's configuration with Hydra and collects everything that is wrong with it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from trainer.conf_files import COMPOSE_ERRORS, file_problems, loader, options_of
from trainer.config import register_schema
from trainer.saved import node_of, show
from trainer.words import did_you_mean, first_line, listed, names_below, nearest

_NULL_ERRORS = (AssertionError, AttributeError)  # what OmegaConf 2.3 raises for a key below a mapping that is null

_LIST_GROUPS = ("logger", "callbacks")  # take several options: logger=[jsonl,wandb]
# Where a key that the YAML does not list may be set without `+`; check.py holds it against the target's signature.
_FREE = re.compile(
    r"((?P<root>models\.[^.=]+)\.(build|plugin|optimizer|scheduler|lora)|(?P<node>(callbacks|logger)\.[^.=]+)|"
    r"(?P<task>task)|(?P<data>(models\.[^.=]+\.)?data)\.(train|validation|collate))(\.|=\{)"
)
_WHOLE_GROUPS = ("task", "experiment", "debug")  # without one of these, the rest is another run
_TASK_KEYS = re.compile(r"[+~]*(models|task|callbacks|logger|data)\b")  # what another task may lack


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for: where the configuration lies and what changes."""

    overrides: tuple[str, ...] = ()
    config_path: Path
    config_name: str = "config"
    config_dir: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """Where YAML files may lie, the user's own first."""
        return [folder for folder in (self.config_dir, self.config_path) if folder is not None]


@dataclass(kw_only=True)
class Composition:
    """The part of a configuration that composes, and every problem of the rest."""

    cfg: DictConfig | None = None  # None also where so much is wrong that the rest cannot be judged
    hydra: DictConfig | None = None  # with Hydra's own node
    overrides: list[str] = field(default_factory=list)  # as Hydra takes them: `++` before free keys
    problems: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)  # keys whose value on the command line was no good

    def is_moot(self, problem: str) -> bool:
        """Returns whether a problem would not be there but for a rejected key."""
        return any(problem.startswith(key) for key in self.rejected)


def conf_dir() -> Path:
    """Returns the folder of the trainer's own configuration: in the wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").is_file())


def compose_run(request: Request) -> Composition:
    """Composes what can be composed; problems of the command line and of each file come together."""
    problems = list(_missing_places(request))
    if problems:
        return Composition(problems=problems)
    start_hydra(request)
    overrides, problems = _split_grammar(request.overrides)
    problems += _hidden_files(request)
    chosen = sorted((o for o in overrides if is_group(o)), key=lambda o: "@" in o.key_or_group)
    groups, base, found, intact = _compose_groups(request, [spell_null(o) for o in chosen])
    problems += found
    if base is None:
        return Composition(overrides=groups, problems=problems)
    values = [o for o in overrides if not is_group(o) and (intact or not _TASK_KEYS.match(str(o.input_line)))]
    lines = [*_without_callbacks(chosen, base), *(open_free_key(str(o.input_line), base) for o in values)]
    good, cfg, found = _compose_values(request, groups, lines, base)
    problems += found
    unresolved = list(_unresolvable(cfg)) if intact else []
    if intact:
        problems += [*_untyped_keys(cfg), *unresolved]
    # what cannot be resolved cannot be checked any further
    return _composed(
        cfg if intact and not unresolved else None, overrides=good, problems=problems, rejected=_rejected(request, good)
    )


def start_hydra(request: Request) -> None:
    """Initializes Hydra with the search path that its own command line would use."""
    register_schema()
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    path = create_config_search_path(str(request.config_path))
    if request.config_dir is not None:
        path.prepend("command-line", f"file://{request.config_dir}", anchor=SearchPathQuery(provider="schema"))
    Hydra.create_main_hydra2(task_name="trainer", config_search_path=path)


def open_free_key(override: str, base: DictConfig) -> str:
    """Puts `++` before a key that a node of `base` takes without listing it, such as a constructor's argument."""
    match = _FREE.match(override)
    if match is None or "=" not in override:
        return override
    root = next(name for name in match.group("root", "node", "task", "data") if name)
    known = OmegaConf.select(base, root, default=None, throw_on_missing=False) is not None
    is_new_node = bool(match["node"]) and "_target_" in override
    return f"++{override}" if known or is_new_node else override


# --- places and grammar


def _missing_places(request: Request) -> Iterator[str]:
    for option, folder in (("--config-path", request.config_path), ("--config-dir", request.config_dir)):
        if folder is not None and not folder.is_dir():
            yield f"{option}={show(folder)}: there is no such folder"
            return
    name = request.config_name.removesuffix(".yaml")
    if not (request.config_path / f"{name}.yaml").is_file():
        files = (path.stem for path in request.config_path.glob("*.yaml"))
        yield f"--config-name={name}: {show(request.config_path)} has no {name}.yaml{did_you_mean(name, files)}"


def _hidden_files(request: Request) -> Iterator[str]:
    """A user's file that has the name of one of ours would be silently left out."""
    for path in sorted(request.config_dir.glob("*/**/*.yaml")) if request.config_dir else []:
        name = path.relative_to(request.config_dir or "")
        ours = request.config_path / name
        if name.parts[0] != "local" and ours.is_file() and ours.read_bytes() != path.read_bytes():
            yield f"{show(path)}: {name.with_suffix('')} is one of the trainer's own; give yours another name"


def _split_grammar(overrides: Iterable[str]) -> tuple[list[Override], list[str]]:
    parser, good, problems = OverridesParser.create(), [], []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            problems.append(f"{text}: {_grammar_text(text, error)}")
            continue
        if override.is_sweep_override():
            problems.append(
                f"{text}: several values need -m (one run for each); a list is written {override.key_or_group}=[a,b], "
                f"and a value that contains a comma needs quotes: {_quoted(text)}"
            )
        else:
            good.append(override)
    return good, problems


def _grammar_text(text: str, error: Exception) -> str:
    _, sign, value = text.partition("=")
    if not sign and not text.startswith("~"):
        return "not of the form key=value; options such as --help start with two dashes"
    if re.search(r"[=,:{}\[\]()'\"\s]", value):
        return f"a value that contains = , or another sign of the grammar needs quotes: {_quoted(text)}"
    return str(error.__cause__ or error).splitlines()[0]


def _quoted(text: str) -> str:
    key, _, value = text.partition("=")
    inner = value.strip("'\"").replace('"', '\\"')
    return f"{key}='\"{inner}\"'"


# --- groups


def _groups(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir() and not path.name.startswith("_")
    }


def _group_of(override: Override) -> str:
    return str(override.key_or_group)


def is_group(override: Override) -> bool:
    group = _group_of(override)
    if override.package is not None or "/" in group:
        return True
    if not override.is_delete() and isinstance(override.value(), dict):
        return False  # `task={...}` sets keys
    return "." not in group and (group in loader().list_groups("") or group in _groups(conf_dir()))


def spell_null(override: Override) -> str:
    """Hydra refuses `group=null` on the command line; `~group` and `group=[]` are its words for none."""
    line = str(override.input_line)
    if not is_group(override) or override.is_delete() or override.value() is not None:
        return line
    key = line.partition("=")[0].lstrip("+")
    return f"{key}=[]" if key in _LIST_GROUPS else f"~{key}"


def _without_callbacks(chosen: list[Override], base: DictConfig) -> Iterator[str]:
    """`callbacks=null` means none, not even those that the task lists itself."""
    for override in chosen:
        group = _group_of(override)
        if group in _LIST_GROUPS and not override.is_delete() and override.value() is None:
            yield from (f"~{group}.{name}" for name in base[group])


def _try(request: Request, overrides: list[str]) -> tuple[DictConfig | None, Exception | None]:
    try:
        return compose(request.config_name, overrides=overrides, return_hydra_config=True), None
    except (*COMPOSE_ERRORS, *_NULL_ERRORS) as error:
        return None, error


def _compose_groups(request: Request, chosen: list[str]) -> tuple[list[str], DictConfig | None, list[str], bool]:
    """Returns the group choices that hold, what they compose to, problems, and whether nothing had to be left out."""
    cfg, error = _try(request, chosen)
    if error is None:
        return chosen, cfg, [], True
    plain, error = _try(request, [])
    if plain is None:
        assert error is not None
        return [], None, file_problems(request.config_name, request.folders, [], error), False
    good: list[str] = []
    problems: list[str] = []
    intact = True
    for line in chosen:
        cfg, error = _try(request, [*good, line])
        if error is None:
            good.append(line)
            continue
        text, guess = _group_problem(line, choices=_choices(plain if not good else _try(request, good)[0]))
        problems += (
            [f"{line}: {text}"] if text else file_problems(request.config_name, request.folders, [*good, line], error)
        )
        # The rest is judged as if the nearest name had been given: one misspelt word is one problem.
        if guess and _try(request, [*good, guess])[1] is None:
            good.append(guess)
        else:
            intact = intact and text is not None and _key(line) not in _WHOLE_GROUPS
    return good, _try(request, good)[0], problems, intact


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
        near = nearest(group, _all_groups())
        guess = line.replace(group, near, 1) if near else None
        return f"there is no group {group}{f'; did you mean {near}?' if near else listed(_all_groups())}", guess
    known = [choice for choice in choices if choice.partition("@")[0] == group]
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


def _all_groups() -> list[str]:
    return [group for group in loader().list_groups("") if group not in ("hydra", "local")]


def _saved_text(group: str) -> str:
    keys = {
        "logger": "drop one with ~logger.wandb",
        "callbacks": "drop one with ~callbacks.progress",
        "data": "set its keys, such as data.train=...",
    }
    hint = keys.get(group, "set the keys themselves, such as models.<name>.plugin.zero_optimization.stage=3")
    return f"a saved configuration has no groups to choose from; {hint}, or start again from task=..."


# --- values


def _compose_values(
    request: Request, groups: list[str], values: list[str], base: DictConfig
) -> tuple[list[str], DictConfig, list[str]]:
    cfg, error = (base, None) if not values else _try(request, groups + values)
    if cfg is not None:
        return groups + values, cfg, []
    good, problems, last = list(groups), [], base
    for value in values:
        cfg, error = _try(request, [*good, value])
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
    known = [*names_below(cfg), *_all_groups()]
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return f"{written}: there is no such key{did_you_mean(key, known)}"
    if isinstance(cause, _NULL_ERRORS):
        return f"{written}: {_null_text(key, cfg)}"
    hint = did_you_mean(key, known) if OmegaConf.select(cfg, key, default=None) is None and key not in known else ""
    return f"{written}: {first_line(cause)}{hint}"


def _null_text(key: str, cfg: DictConfig) -> str:
    parts = key.split(".")
    heads = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    null = next((head for head in heads if OmegaConf.select(cfg, head, default=None) is None), key)
    group = null.rpartition(".")[2]
    hint = f"; choose one first: {group}@{null}=..." if null.startswith("models.") else ""
    return f"{null} is null, so it has no keys{hint}"


def _nodes(cfg: DictConfig | ListConfig, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, parent, key) of every entry below a node, Hydra's own left out."""
    if cfg._is_none() or cfg._is_missing() or cfg._is_interpolation():
        return
    keys: Iterable[Any] = cfg if isinstance(cfg, DictConfig) else range(len(cfg))
    for key in keys:
        if prefix or key != "hydra":
            yield f"{prefix}{key}", cfg, key
            child = node_of(cfg, key)
            if isinstance(child, DictConfig | ListConfig):
                yield from _nodes(child, f"{prefix}{key}.")


def _untyped_keys(cfg: DictConfig) -> Iterator[str]:
    """`+` lets a key into a typed node; nothing would ever read it."""
    for name, parent, key in _nodes(cfg):
        kind = OmegaConf.get_type(parent)
        if isinstance(kind, type) and is_dataclass(kind):
            known = [item.name for item in fields(kind)]
            if key not in known:
                prefix = name.removesuffix(str(key))
                yield f"{name}: there is no such key{did_you_mean(name, [prefix + other for other in known])}"


def _unresolvable(cfg: DictConfig) -> Iterator[str]:
    _set_hydra(cfg)
    for name, parent, key in _nodes(cfg):
        if OmegaConf.is_interpolation(parent, key):
            try:
                parent[key]
            except OmegaConfBaseException as error:
                yield f"{name}={node_of(parent, key)._value()}: {first_line(error)}"


def _rejected(request: Request, good: list[str]) -> list[str]:
    kept = {_key(line) for line in good}
    return [_key(line).rpartition("@")[2] for line in request.overrides if _key(line) not in kept]


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0]


def _composed(cfg: DictConfig | None, *, overrides: list[str], problems: list[str], rejected: list[str]) -> Composition:
    if cfg is None:
        return Composition(overrides=overrides, problems=problems)
    _set_hydra(cfg)
    plain = cfg.copy()
    OmegaConf.set_struct(plain, False)
    del plain["hydra"]
    OmegaConf.set_struct(plain, True)
    return Composition(cfg=plain, hydra=cfg, overrides=overrides, problems=problems, rejected=rejected)


def _set_hydra(cfg: DictConfig) -> None:
    """Makes `${hydra:...}` resolve; a user's own keys may use it."""
    HydraConfig.instance().set_config(cfg)
