"""The folder of a run and the configuration in it, saved in a form that runs again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

SAVED = "config.yaml"


def propose_folder(cfg: DictConfig) -> Path:
    """Returns where this run's outputs go; `cfg` holds Hydra's node."""
    return Path(str(cfg.hydra.run.dir))


def check_folder(folder: Path) -> list[str]:
    """Returns why a run cannot write to this folder, before it is made."""
    if folder.is_dir() and any(folder.iterdir()):
        return [f"hydra.run.dir={folder}: holds the files of an earlier run; name another folder, or leave it out"]
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        return [f"hydra.run.dir={folder}: {show(place)} is a file; name a folder"]
    if not os.access(place, os.W_OK | os.X_OK):
        return [f"hydra.run.dir={folder}: {place.absolute()} cannot be written to; name another folder"]
    return []


def claim_folder(folder: Path, *, tries: int = 100) -> Path:
    """Creates the run's folder and returns it; a name that is taken, even in the same microsecond, is not used again.

    An existing empty folder is taken as it is: a sweep makes those of its jobs.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in range(tries):
        candidate = folder if number == 0 else _next_name(folder, number)
        try:
            candidate.mkdir()
        except FileExistsError:
            if number or not candidate.is_dir() or any(candidate.iterdir()):
                continue
        return candidate
    raise FileExistsError(f"{folder} and {tries - 1} names like it are taken")


def _next_name(folder: Path, number: int) -> Path:
    try:
        datetime.strptime(folder.name, "%Y-%m-%d_%H-%M-%S-%f")
    except ValueError:
        return folder.with_name(f"{folder.name}_{number}")
    return folder.with_name(datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))


def save_config(cfg: DictConfig, folder: Path) -> Path:
    """Writes the configuration resolved, as a file that repeats the run; values from `oc.env` stay references."""
    name = str(HydraConfig.get().job.name)
    place = show(folder)
    head = (
        f"# python -m trainer --config-path={place} --config-name=config\n"
        "# repeats this run in a new folder; further key=value change it\n"
    )
    hydra = {
        "job": {"name": name},
        "run": {"dir": f"outputs/{name}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"},
        "sweep": {"dir": f"outputs/{name}/${{now:%Y-%m-%d_%H-%M-%S-%f}}", "subdir": "${hydra:job.num}"},
        "output_subdir": None,
    }
    none = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    path = folder / SAVED
    content = {"defaults": ["run_schema", "_self_", *none], "hydra": hydra, **resolved(cfg)}
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Returns the configuration as plain containers; what depends on an environment variable stays unresolved."""
    with _watch_environment() as seen:
        plain = _plain(cfg, seen)
    assert isinstance(plain, dict)
    return plain


def _plain(node: DictConfig | ListConfig, seen: list[str]) -> Any:
    if node._is_none():
        return None
    take = partial(_plain_entry, node, seen=seen)
    if isinstance(node, DictConfig):
        return {key: take(key) for key in node}
    return [take(index) for index in range(len(node))]


def _plain_entry(parent: DictConfig | ListConfig, key: Any, *, seen: list[str]) -> Any:
    if OmegaConf.is_missing(parent, key):
        return "???"
    seen.clear()
    value = parent[key]
    if isinstance(value, DictConfig | ListConfig):
        return _plain(value, seen)
    if seen:
        return node_of(parent, key)._value()
    return getattr(value, "name", value) if not isinstance(value, str | int | float | bool | None) else value


def node_of(parent: DictConfig | ListConfig, key: Any) -> Any:
    """Returns an entry as OmegaConf holds it, its interpolation unresolved."""
    return parent._get_node(key)


@contextmanager
def _watch_environment() -> Iterator[list[str]]:
    """Yields a list of the environment variables that interpolations have read."""
    seen: list[str] = []

    def read(key: str, *default: str | None) -> str | None:
        seen.append(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", read, replace=True)
    try:
        yield seen
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def show(path: Path) -> str:
    """Returns the path as a user would type it: relative where it lies below the working folder."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
