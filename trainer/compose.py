"""Composes a run's configuration with Hydra and collects everything that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainer import kept, resumed
from trainer.conf_files import Request, conf_dir, options_of
from trainer.conf_groups import compose_groups, group_of, is_group, key_of, spell_null, without_callbacks
from trainer.conf_values import compose_values, open_free_key, unresolvable, untyped_keys
from trainer.config import register_schema
from trainer.saved import SAVED, node_of, propose_folder, show
from trainer.start_weights import build_order
from trainer.words import did_you_mean

if TYPE_CHECKING:
    from trainer.resume import Found
    from trainer.saving.checkpoints import Resumption

__all__ = ["Composition", "Request", "compose_run", "conf_dir", "start_hydra"]

_ABSENT = object()
_TASK_KEYS = re.compile(r"[+~]*(models|task|callbacks|logger|data)\b")  # what another task may lack
_RUN_DIR = "hydra.run.dir"


@dataclass(kw_only=True)
class Composition:
    """The part of a configuration that composes, and every problem of the rest."""

    cfg: DictConfig | None = None  # None also where so much is wrong that the rest cannot be judged
    hydra: DictConfig | None = None  # with Hydra's own node
    overrides: list[str] = field(default_factory=list)  # as Hydra takes them: `++` before free keys
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)  # keys whose value on the command line was no good
    resumption: Resumption | None = None  # None: the run starts from the beginning
    saved: DictConfig | None = None  # the configuration in the checkpoint that it goes on from

    def is_moot(self, problem: str) -> bool:
        """Returns whether a problem would not be there but for a rejected key."""
        return any(problem.startswith(key) for key in self.rejected)


def compose_run(request: Request) -> Composition:
    """Composes what can be composed; problems of the command line and of each file come together."""
    problems = list(_missing_places(request))
    if problems:
        return Composition(problems=problems)
    start_hydra(request)
    overrides, problems = _split_grammar(request.overrides)
    problems += _hidden_files(request)
    composition = _compose_any(request, overrides)
    composition.problems[:0] = problems
    return composition


def _compose_any(request: Request, overrides: list[Override]) -> Composition:
    value, folder = _given(overrides, "resume"), _given(overrides, _RUN_DIR)
    fresh = None
    if value is None or "${" in f"{value}{folder}" or (folder is None and value in ("auto", "last", "best")):
        fresh = _compose_fresh(request, overrides)
        if fresh.cfg is None or fresh.hydra is None or fresh.cfg.resume is None:
            return fresh
        value, folder = str(fresh.cfg.resume), _fixed_folder(fresh.hydra, is_given=folder is not None)
    # Imported only here: it needs torch.
    from trainer import resume

    found = resume.find(value, None if folder is None else Path(folder))
    if found.resumption is not None and found.resumption.candidates:
        return _compose_resumed(request, overrides, found, has_folder=folder is not None)
    if found.problems:
        # Without the checkpoint nobody knows its task, and so whether the other words are right.
        has_task = any(is_group(o) and group_of(o) == "task" for o in overrides)
        others = (fresh or _compose_fresh(request, overrides)).problems if has_task else []
        return Composition(problems=[*found.problems, *others])
    fresh = fresh or _compose_fresh(request, overrides)
    fresh.resumption = found.resumption
    fresh.warnings += found.warnings
    return fresh


def _given(overrides: list[Override], key: str) -> str | None:
    """Returns the last value of a key on the command line."""
    values = [o.value() for o in overrides if group_of(o) == key and not o.is_delete()]
    return None if not values or values[-1] is None else str(values[-1])


def _fixed_folder(hydra: DictConfig, *, is_given: bool) -> str | None:
    """Returns hydra.run.dir where it is the same each time, also by a file of the user's."""
    is_new = "${now:" in str(node_of(hydra.hydra.run, "dir")._value())
    return None if is_new and not is_given else str(propose_folder(hydra))


def _compose_fresh(request: Request, overrides: list[Override]) -> Composition:
    chosen = _choices(overrides)
    groups, base, problems, intact = compose_groups(request, [spell_null(o) for o in chosen])
    if base is None:
        return Composition(overrides=groups, problems=problems)
    values = [*without_callbacks(chosen, base), *_values(overrides, base, intact=intact)]
    good, cfg, found = compose_values(request.config_name, groups, values, base)
    return _composed(request, cfg, good=good, problems=problems + found, intact=intact)


def _compose_resumed(request: Request, overrides: list[Override], found: Found, *, has_folder: bool) -> Composition:
    """Composes the checkpoint's configuration with what the command line says on top.

    Args:
        has_folder: Whether hydra.run.dir is given.
    """
    assert found.resumption is not None
    saved = resumed.read_saved(found.resumption.candidates[0] / SAVED)
    if isinstance(saved, str):
        return Composition(problems=[saved])
    chosen = _choices(overrides)
    laid = resumed.lay_choices(saved, chosen, request)
    if laid.cfg is None:
        return Composition(problems=laid.problems)
    values = [*without_callbacks(chosen, laid.cfg), *_values(overrides, laid.cfg, intact=laid.intact)]
    values, moot = _once_more(values, laid.cfg)
    own = [spell_null(o) for o in chosen if group_of(o).startswith("hydra/")]
    trains = (_given(overrides, "mode") or saved.cfg.mode) == "fit"
    if has_folder or trains:
        folder = str(found.resumption.run_folder).replace("\\", "\\\\").replace('"', '\\"')
        values.append(f'{_RUN_DIR}="{folder}"')
    good, cfg, wrong = compose_values(resumed.NAME, own, values, laid.cfg)
    lines = [*laid.lines, *good, *(str(o.input_line) for o in chosen if group_of(o) == "task")]
    composition = _composed(request, cfg, good=lines, problems=laid.problems + wrong, intact=laid.intact)
    composition.resumption, composition.saved = found.resumption, saved.cfg
    if not (has_folder or trains):  # a look at a run does not change it
        composition.resumption = replace(found.resumption, run_folder=propose_folder(cfg), goes_on=False)
    composition.warnings += [*found.warnings, *moot, *_unused(request, overrides, composition)]
    return composition


def _once_more(lines: list[str], saved: DictConfig) -> tuple[list[str], list[str]]:
    """Returns overrides that may have been given before, as they are to be given again, and those that change nothing.

    What was added is there and is replaced; what was deleted is gone.
    """
    gone = [
        line
        for line in lines
        if line.startswith("~") and OmegaConf.select(saved, line[1:].partition("=")[0], default=_ABSENT) is _ABSENT
    ]
    again = [f"+{line}" if line.startswith("+") and not line.startswith("++") else line for line in lines]
    return [line for line in again if line not in gone], [f"{line}: it is not there in the run" for line in gone]


def _unused(request: Request, overrides: list[Override], composition: Composition) -> Iterator[str]:
    """A saved configuration that the command line names is not that of the checkpoint."""
    if options_of("task") or composition.cfg is None or composition.hydra is None:
        return
    asked = _compose_fresh(request, overrides)
    keys = kept.differing_keys(composition.cfg, asked.cfg) if asked.cfg is not None else []
    HydraConfig.instance().set_config(composition.hydra)  # the one that counts
    if keys:
        file = show(request.config_path / f"{request.config_name.removesuffix('.yaml')}.yaml")
        yield f"{file}: {', '.join(keys)}: not used; a resumed run starts from the configuration in its checkpoint"


def _choices(overrides: list[Override]) -> list[Override]:
    return sorted((o for o in overrides if is_group(o)), key=lambda o: "@" in o.key_or_group)


def _values(overrides: list[Override], base: DictConfig, *, intact: bool) -> Iterator[str]:
    for override in overrides:
        line = str(override.input_line)
        if not is_group(override) and (intact or not _TASK_KEYS.match(line)):
            yield open_free_key(line, base)


def start_hydra(request: Request) -> None:
    """Initializes Hydra with the search path that its own command line would use."""
    register_schema()
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    path = create_config_search_path(str(request.config_path))
    if request.config_dir is not None:
        path.prepend("command-line", f"file://{request.config_dir}", anchor=SearchPathQuery(provider="schema"))
    Hydra.create_main_hydra2(task_name="trainer", config_search_path=path)


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


def _composed(request: Request, cfg: DictConfig, *, good: list[str], problems: list[str], intact: bool) -> Composition:
    HydraConfig.instance().set_config(cfg)  # `${hydra:...}` resolves; a user's own keys may use it
    unresolved = list(unresolvable(cfg)) if intact else []
    problems = [*problems, *(untyped_keys(cfg) if intact else []), *unresolved]
    if not intact or unresolved:  # what cannot be resolved cannot be checked any further
        return Composition(overrides=good, problems=problems)
    plain = cfg.copy()
    OmegaConf.set_struct(plain, False)
    del plain["hydra"]
    _inherit_builds(plain)
    OmegaConf.set_struct(plain, True)
    return Composition(cfg=plain, hydra=cfg, overrides=good, problems=problems, rejected=_rejected(request, good))


def _inherit_builds(cfg: DictConfig) -> None:
    """Gives a model without a build that of the model whose start weights it takes."""
    origins = {str(name): model.init_from for name, model in cfg.models.items()}
    for name in build_order(origins):
        origin = origins[name]
        if origin in origins and not cfg.models[name].build:
            cfg.models[name].build = cfg.models[origin].build.copy()


def _rejected(request: Request, good: list[str]) -> list[str]:
    kept_keys = {key_of(line) for line in good}
    return [key_of(line).rpartition("@")[2] for line in request.overrides if key_of(line) not in kept_keys]
