"""The folder of a run and the configuration in it, saved in a form that runs again."""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from trainer.config import ConfigError
from trainer.redact import ask_for_secrets
from trainer.saving.checkpoints import write_text

SAVED = "config.yaml"
SUMMARY = "summary.json"
_HEAD = "# python -m trainer --config-path="  # how a file of ours begins
_LOCK = ".lock"
_CHECKPOINT = "checkpoints/step-*"
_FIRST_FILES = {_LOCK, "run.log", f".{SAVED}.part"}  # there before the configuration is


def propose_folder(cfg: DictConfig) -> Path:
    """Returns where this run's outputs go; `cfg` holds Hydra's node."""
    return Path(str(cfg.hydra.run.dir))


def check_folder(folder: Path, *, is_own: bool = False) -> list[str]:
    """Returns why a run cannot write to this folder, before it is made.

    Args:
        is_own: Whether the files in it are of the run that goes on.
    """
    if folder.is_dir() and any(folder.iterdir()) and not is_own:
        hint = ", or go on with that run: resume=auto" if (folder / SAVED).is_file() else ""
        text = "holds the files of an earlier run; name another folder, or leave it out"
        return [f"hydra.run.dir={folder}: {text}{hint}"]
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        return [f"hydra.run.dir={folder}: {show(place)} is a file; name a folder"]
    if not os.access(place, os.W_OK | os.X_OK):
        return [f"hydra.run.dir={folder}: {place.absolute()} cannot be written to; name another folder"]
    return []


def is_attempt(folder: Path) -> bool:
    """Returns whether a folder holds a run of ours that has come neither to its end nor to a checkpoint."""
    if any(folder.glob(_CHECKPOINT)):
        return False
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names or SAVED not in names:
        return bool(names) and names <= _FIRST_FILES
    with (folder / SAVED).open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(_HEAD) and _status(folder) not in ("completed", "stopped")


def _status(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or of a run that died while it wrote it
        return None


def claim_folder(folder: Path, *, is_own: bool = False, tries: int = 100) -> Path:
    """Creates the run's folder and returns it; a name that is taken, even in the same microsecond, is not used again.

    An existing empty folder is taken as it is: a sweep makes those of its jobs.

    Args:
        is_own: Whether the files in it are of the run that goes on; it is then taken as it is, too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in range(tries):
        candidate = folder if number == 0 else _next_name(folder, number)
        try:
            candidate.mkdir()
        except FileExistsError:
            if number or not candidate.is_dir() or (any(candidate.iterdir()) and not is_own):
                continue
        return candidate
    raise FileExistsError(f"{folder} and {tries - 1} names like it are taken")


def lock_folder(folder: Path) -> FileLock:
    """Returns the lock of a run's folder, held until it is released or this process ends; another run is refused."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"hydra.run.dir={show(folder)}: another run writes to it; wait for its end, or name another folder"
        ) from None
    return lock


def _next_name(folder: Path, number: int) -> Path:
    try:
        datetime.strptime(folder.name, "%Y-%m-%d_%H-%M-%S-%f")
    except ValueError:
        return folder.with_name(f"{folder.name}_{number}")
    return folder.with_name(datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))


def save_config(cfg: DictConfig, folder: Path) -> Path:
    """Writes the configuration to the run's folder: config.yaml, or config.<n>.yaml beside those of earlier parts."""
    names = itertools.chain([SAVED], (SAVED.replace(".", f".{number}.") for number in itertools.count(1)))
    path = next(folder / name for name in names if not (folder / name).exists())
    return write_config(cfg, path)


def write_config(cfg: DictConfig, path: Path) -> Path:
    """Writes the configuration to a file, in one piece."""
    write_text(path, config_text(cfg, place=path.parent, file_name=path.stem))
    return path


def config_text(cfg: DictConfig, *, place: Path, file_name: str = "config") -> str:
    """Returns the configuration resolved, as a file that repeats the run; values from `oc.env` stay references.

    Args:
        place: The folder that the first line names.
    """
    name = str(HydraConfig.get().job.name)
    head = (
        f"{_HEAD}{show(place)} --config-name={file_name}\n"
        "# repeats this run in a new folder; further key=value change it\n"
    )
    hydra = {
        "job": {"name": name},
        "run": {"dir": f"outputs/{name}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"},
        "sweep": {"dir": f"outputs/{name}/${{now:%Y-%m-%d_%H-%M-%S-%f}}", "subdir": "${hydra:job.num}"},
        "output_subdir": None,
    }
    none = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    # Without `resume`: the file stands for the run from its beginning, whatever it was resumed from.
    content = {"defaults": ["run_schema", "_self_", *none], "hydra": hydra, **resolved(cfg), "resume": None}
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Returns the configuration, or a part of it, as plain containers that may be shown and written.

    What depends on an environment variable stays unresolved; what is secret is `???`, to be given again.
    """
    with _watch_environment() as seen:
        plain = ask_for_secrets(_plain(cfg, seen))
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
