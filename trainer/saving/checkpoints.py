"""Checkpoints on disk: each whole or not there, checked by a manifest, kept as long as it was asked for."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

log = logging.getLogger(__name__)

FOLDER = "checkpoints"  # in the folder of a run
LAST, BEST = "last", "best"  # links to one of the checkpoints beside them
MANIFEST, CONFIG, METRICS = "manifest.json", "config.yaml", "metrics.json"
FORMAT = 1
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.(part|deleted)")  # half-written and half-deleted ones
_READ = (".safetensors", ".json", ".yaml")  # endings of a checkpoint's files


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that must not be loaded."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """When checkpoints are written and which of them stay.

    Args:
        every: Global steps between two; None: only at the end, and when a signal asks for one.
        keep_last: The newest so many stay.
        keep_best: The best so many by `monitor`, where there is one.
        keep_every: Those of steps that it divides stay for good.
        monitor: Full name of a validation metric, such as val/cross_entropy; a validation that is among the best is
            followed by a checkpoint.
        mode: "min" or "max": which way the metric is better.
        background: Training waits for a copy in memory only, and goes on while that is written.
    """

    every: int | None = None
    keep_last: int = 1
    keep_best: int = 1
    keep_every: int | None = None
    monitor: str | None = None
    mode: str = "min"
    background: bool = False

    def ranked(self, scores: Mapping[Path, float]) -> list[Path]:
        """Returns the scored checkpoints, the best first; of equals the older."""
        sign = 1 if self.mode == "min" else -1
        return sorted(scores, key=lambda path: (sign * scores[path], step_of(path)))


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where a run goes on from.

    Args:
        candidates: Checkpoints, the newest first: the first whole one is taken.
        run_folder: Where the outputs go.
        goes_on: Whether that is the folder of the run that is resumed, not a new one.
    """

    candidates: list[Path]
    run_folder: Path
    goes_on: bool


# Names and places ----------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a global step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the global step of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def is_name(name: str) -> bool:
    """Returns whether a folder of this name is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint by its name and has a manifest; says nothing about its content."""
    return is_name(path.name) and (path / MANIFEST).is_file()


def find_all(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder of them, the newest first; half-written and set aside ones are none."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if is_checkpoint(path)), key=step_of, reverse=True)


def candidates(path: Path) -> list[Path]:
    """Returns the checkpoints that a path from a user may mean, the newest first: a run's, or one of them."""
    real = path.resolve()
    found = [real] if is_name(real.name) else find_all(real / FOLDER) or find_all(real)
    if not found:
        raise ConfigError(f"resume={path}: holds no checkpoint; give a run folder, or one checkpoint in it")
    return found


def pointed_to(folder: Path, pointer: str) -> Path | None:
    """Returns the checkpoint that `last` or `best` stands for, None where there is none.

    A link that leads anywhere but to a checkpoint beside it is none.
    """
    try:
        name = os.readlink(folder / pointer)
    except OSError:
        return None
    path = folder / name
    return path if is_name(name) and is_checkpoint(path) else None


# Reading -------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, or raises CheckpointError for what is none."""
    manifest = read_json(path, MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"{path}: {MANIFEST} has format {found}, expected {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: {MANIFEST} names no files")
    for name in files:
        if not _is_inside(path, name):
            raise CheckpointError(f"{path}: {MANIFEST} names {name!r}, which is no file inside of the checkpoint")
    for name, facts in files.items():
        known = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if not (isinstance(known[0], int) and isinstance(known[1], str)):
            raise CheckpointError(f"{path}: {MANIFEST} does not give the size and the digest of {name}")
    return manifest


def _is_inside(path: Path, name: str) -> bool:
    """Returns whether a name leads, by no link, to what lies in the checkpoint."""
    try:
        found = os.path.realpath(path / name)
    except ValueError:  # no name of any file
        return False
    return found == f"{os.path.realpath(path)}{os.sep}{name}"


def find_damage(path: Path, *, rank: int = 0, world_size: int = 1, digests: bool = True) -> str | None:
    """Returns the first thing that is wrong with a checkpoint by its manifest, None for a whole one.

    Nothing is deserialised.

    Args:
        rank: Of several that share the work, each with every `world_size`-th file.
        digests: Whether contents are checked, not only that all files are there with their size.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    if is_name(path.name) and manifest.get("step") != step_of(path):
        return f"{path}: {MANIFEST} is that of step {manifest.get('step')}"
    files = manifest["files"]
    for index, (name, facts) in enumerate(sorted(files.items())):
        try:
            damage = _damage_of(path / name, facts, digest=digests and index % world_size == rank)
        except OSError as error:
            damage = f"cannot be read ({error})"
        if damage is not None:
            return f"{path}: {name} {damage}"
    return next((f"{path}: {name} was not saved with it; move it away" for name in _unnamed(path, files)), None)


def _damage_of(file: Path, facts: Mapping[str, Any], *, digest: bool) -> str | None:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != facts["bytes"]:
        return f"has {size} bytes, expected {facts['bytes']}"
    if digest and digest_of(file) != facts["sha256"]:
        return "does not hold what was saved (its sha256 differs)"
    return None


def _unnamed(path: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Yields what would be taken for a part of the checkpoint, where files are found by their names, and is none."""
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        is_own = name in files or name in (MANIFEST, METRICS)
        if not is_own and file.suffix in _READ and not file.name.startswith(".") and not file.is_dir():
            yield name


def digest_of(file: Path) -> str:
    """Returns the sha256 of a file's content."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_json(path: Path, name: str) -> Any:
    """Returns the content of a JSON file of a checkpoint, or raises CheckpointError."""
    try:
        return json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read ({error})") from error


# Writing -------------------------------------------------------------------------------------------------------------


def write_text(file: Path, text: str) -> None:
    """Writes a small file in one piece: it is there with all of its content, or as it was before."""
    part = file.with_name(f".{file.name}.part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def stage(folder: Path, step: int) -> Path:
    """Returns the empty folder in which the checkpoint of a step is written; what a dead run left there is gone."""
    for left in folder.glob(".*"):
        if _LEFT.fullmatch(left.name):
            _delete(left)
    staged = folder / f".{name_of(step)}.part"
    staged.mkdir(parents=True)
    return staged


def describe_files(staged: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns size and digest of files that this rank wrote, once they are safe on the disk."""
    # Digests first: meanwhile the system writes, and less is left to wait for.
    with ThreadPoolExecutor(2) as pool:  # hashlib lets go of the interpreter
        digests = list(pool.map(lambda name: digest_of(staged / name), names))
    sizes = [(staged / name).stat().st_size for name in names]
    facts = {n: {"bytes": size, "sha256": digest} for n, size, digest in zip(names, sizes, digests, strict=True)}
    for name in names:
        _sync(staged / name)
    return facts


def commit(staged: Path, *, step: int, files: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
    """Makes a staged checkpoint the newest one, from one moment to the next, and returns it."""
    for name in files:
        if not (staged / name).is_file():
            raise CheckpointError(
                f"{name}, of another rank, is not in {staged}: all ranks must write to one file system"
            )
    manifest = {"format": FORMAT, "step": step, **facts, "files": dict(sorted(files.items()))}
    write_text(staged / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for folder in {staged / parent for name in files for parent in Path(name).parents}:
        _sync(folder)
    path = staged.with_name(name_of(step))
    if path.exists():  # a run that was resumed from before this step has come here again
        set_aside([path], why="superseded")
    staged.rename(path)
    _sync(path.parent)
    point(LAST, path)
    return path


def point(pointer: str, path: Path) -> None:
    """Makes `last` or `best` stand for a checkpoint beside it."""
    link = path.with_name(pointer)
    part = path.with_name(f".{pointer}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(path.name)
    part.replace(link)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Keeping -------------------------------------------------------------------------------------------------------------


def score(path: Path, metrics: Mapping[str, float]) -> None:
    """Notes a checkpoint's validation metrics beside its content."""
    write_text(path / METRICS, json.dumps(dict(metrics), indent=1) + "\n")


def scores(folder: Path, monitor: str) -> dict[Path, float]:
    """Returns the value of a metric of each checkpoint that has one, and that is a number."""
    found = {}
    for path in find_all(folder):
        with suppress(CheckpointError):
            metrics = read_json(path, METRICS)
            value = metrics.get(monitor) if isinstance(metrics, dict) else None
            if isinstance(value, int | float) and -math.inf < value < math.inf:
                found[path] = value
    return found


def retain(folder: Path, plan: CheckpointPlan) -> None:
    """Points `best` to the best checkpoint and deletes those that the plan does not keep."""
    newest = find_all(folder)
    kept = set(newest[: plan.keep_last])
    if plan.keep_every is not None:
        kept |= {path for path in newest if step_of(path) % plan.keep_every == 0}
    if plan.monitor is not None:
        best = plan.ranked(scores(folder, plan.monitor))
        kept |= set(best[: plan.keep_best])
        if best and best[0] in kept and pointed_to(folder, BEST) != best[0]:
            point(BEST, best[0])
    for path in newest:
        if path not in kept:
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)  # what is half deleted must not look like a checkpoint
            _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():  # to where somebody has moved the checkpoint: that stays
        path.unlink()
    else:
        shutil.rmtree(path)


def newer_than(path: Path) -> list[Path]:
    """Returns the checkpoints beside one that are of later steps."""
    return [other for other in find_all(path.parent) if step_of(other) > step_of(path)]


def set_aside(paths: Sequence[Path], *, why: str) -> None:
    """Renames checkpoints that must not be taken for newer ones any more; deleting them is left to the user."""
    for path in paths:
        names = (path.with_name(f"{path.name}.{why}{number or ''}") for number in itertools.count())
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        log.warning("%s is now %s: the run went on from before it; it is yours to delete", path, aside.name)
