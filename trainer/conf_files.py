"""Finds which YAML files of a configuration are wrong, and every wrong entry in them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from trainer.config import RunConfig
from trainer.saved import show
from trainer.words import did_you_mean, first_line, listed, names_below, nearest, one_line

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # ValueError: group=null in 1.3.8
NULL_ERRORS = (AssertionError, AttributeError)  # what OmegaConf 2.3 raises for a key below a mapping that is null


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


def conf_dir() -> Path:
    """Returns the folder of the trainer's own configuration: in the wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").is_file())


def try_compose(config_name: str, overrides: list[str]) -> tuple[DictConfig | None, Exception | None]:
    """Returns what composes with Hydra's own node, or why it does not."""
    try:
        return compose(config_name, overrides=overrides, return_hydra_config=True), None
    except (*COMPOSE_ERRORS, *NULL_ERRORS) as error:
        return None, error


def file_problems(config_name: str, folders: Sequence[Path], overrides: list[str], error: Exception) -> list[str]:
    """Returns the problems of every YAML file that takes part, or what Hydra said where none can be found."""
    if isinstance(error, yaml.YAMLError):
        return list(_syntax_problems(folders)) or [first_line(error)]
    try:
        defaults = loader().compute_defaults_list(config_name, overrides, RunMode.RUN).defaults
    except COMPOSE_ERRORS as cause:
        return [_defaults_problem(cause)]
    problems: list[str] = []
    merged: Any = OmegaConf.structured(RunConfig)
    for default in defaults:
        path = _find_file(str(default.config_path))
        if path is None or str(default.config_path).startswith("hydra/"):
            continue
        merged, wrong = _merge_file(merged, path, package=default.package or "")
        problems += [f"{show(path)}: {text}" for text in wrong]
    return problems or [one_line(error)]


def _syntax_problems(folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*.yaml")):
            try:
                yaml.safe_load(path.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                yield f"{show(path)}: {one_line(error)}"


def _defaults_problem(error: Exception) -> str:
    where, text = "", str(error).split("\nConfig search path")[0].split("\nSearch path")[0]
    if match := re.match(r"In '([^']+)': ", text):
        path = _find_file(match[1])
        where, text = f"{show(path) if path else match[1]}: ", text[match.end() :]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or options_of(group))
        near = nearest(name, options)
        return f"{where}there is no {name} in group {group}{f'; did you mean {near}?' if near else ''}{listed(options)}"
    return where + " ".join(text.split())


def _find_file(config_path: str) -> Path | None:
    for source in loader().get_sources():
        path = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
        if source.scheme() == "file" and path.is_file():
            return path
    return None


def _merge_file(merged: Any, path: Path, *, package: str) -> tuple[Any, list[str]]:
    content = OmegaConf.load(path)
    if not isinstance(content, DictConfig):
        return merged, ["must hold a mapping"]
    for key in ("defaults", "hydra"):
        content.pop(key, None)
    wrong: list[str] = []

    def merge(prefix: str, value: Any) -> None:
        nonlocal merged
        try:
            merged = OmegaConf.merge(merged, _nest(prefix, value))
        except OmegaConfBaseException as error:
            children = value if isinstance(value, Mapping) and error.full_key != prefix else {}
            for key in children:
                merge(f"{prefix}.{key}" if prefix else str(key), value[key])
            if not children:
                wrong.append(_entry_problem(prefix, error, merged))

    merge(package, OmegaConf.to_container(content, resolve=False))
    return merged, wrong


def _nest(key: str, value: Any) -> Any:
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value


def _entry_problem(key: str, error: Exception, merged: DictConfig) -> str:
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return f"{key}: there is no such key{did_you_mean(key, names_below(merged))}"
    return f"{key}: {first_line(error)}"


def loader() -> ConfigLoader:
    """Returns what Hydra, once initialized, loads files with."""
    hydra = GlobalHydra.instance()
    return hydra.config_loader()


def options_of(group: str) -> list[str]:
    """Returns the names that a group offers."""
    return list(loader().get_group_options(group))
