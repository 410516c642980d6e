"""Which checkpoint a run goes on from: what `resume=` means, and what is refused or said about it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.saved import is_attempt, show
from trainer.saving.checkpoints import (
    BEST,
    FOLDER,
    LAST,
    Resumption,
    find_damage,
    is_checkpoint,
    is_name,
    pointed_to,
    step_of,
)
from trainer.words import nearest

AUTO = "auto"
_NEVER = (
    "resume=auto: hydra.run.dir is not given, so each run has a new folder with a name of its own, in which there is "
    "never a checkpoint; starts from the beginning (give hydra.run.dir=<folder> each time, or resume=<run folder>)"
)
_EXPECTED = "give a run folder, its folder checkpoints, or one checkpoint in it"
_NUM_NAMED = 5


@dataclass(kw_only=True)
class Found:
    """What `resume=` led to; without a resumption and problems, the run starts from the beginning."""

    resumption: Resumption | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def owns_files(folder: Path, resumption: Resumption | None) -> bool:
    """Returns whether a run may write to a folder that holds files: its own, or those of an attempt without an end."""
    return resumption is not None and (resumption.goes_on or is_attempt(folder))


def find(value: str, folder: Path | None) -> Found:
    """Returns what to go on from; contents are not read, so that the ranks may have to fall back further.

    The candidates are the checkpoint that was asked for, then those to fall back to, newest first. There is none where
    auto finds only an attempt that ended before its first checkpoint: the run starts anew in that folder.

    Args:
        value: auto, last, best, or a path.
        folder: hydra.run.dir, None where it is not given.
    """
    if not value.strip():
        return Found(problems=["resume is empty; give auto, last, best, a run folder or a checkpoint, or leave it out"])
    if value not in (AUTO, LAST, BEST):
        return _find_path(value, folder)
    if folder is None:
        return Found(warnings=[_NEVER]) if value == AUTO else Found(problems=[_without_folder(value)])
    newest = _steps(folder / FOLDER)
    if value == AUTO and not newest:
        return Found(
            resumption=Resumption(candidates=[], run_folder=folder, goes_on=True) if is_attempt(folder) else None,
            warnings=[f"resume=auto: no checkpoint in {show(folder)} yet; starts from the beginning"],
        )
    if not newest:
        return Found(problems=[f"resume={value}: {show(folder)} holds no checkpoint{_content(folder)}"])
    if value == BEST:
        best = pointed_to(folder / FOLDER, BEST)
        if best is None:
            text = f"{show(folder)} has no best checkpoint, only {_names(newest)}"
            return Found(problems=[f"resume=best: {text}; one is kept where checkpoint.monitor is given"])
        newest = [best, *(path for path in newest if path != best)]
    return _first_whole(value, newest, run_folder=folder, goes_on=True)


def _without_folder(value: str) -> str:
    return (
        f"resume={value}: needs hydra.run.dir=<run folder>, whose checkpoints it looks at; or give the run folder or a "
        "checkpoint itself: resume=<path>"
    )


# --- paths


def _find_path(value: str, folder: Path | None) -> Found:
    path = Path(os.path.abspath(value))
    if not path.is_dir():
        return Found(problems=[f"resume={value}: {_missing_text(path)}"])
    single = _single(path)
    if isinstance(single, str):
        return Found(problems=[f"resume={value}: {single}"])
    if single is not None:
        place, newest = single.parent, [single]
    else:
        place = path / FOLDER if (path / FOLDER).is_dir() else path
        newest = _steps(place)
    if not newest:
        return Found(problems=[f"resume={value}: holds no checkpoint{_content(path)}; {_EXPECTED}"])
    own = Path(show(place.parent)) if place.name == FOLDER else None
    if folder is None and own is None:
        return Found(problems=[f"resume={value}: lies in no run's folder; give hydra.run.dir=<a new folder>"])
    goes_on = own is not None and (folder is None or _is_same(folder, own))
    run_folder = own if folder is None and own is not None else folder
    assert run_folder is not None
    newest = [Path(show(step)) for step in newest]
    if single is not None:
        return _only(value, newest[0], run_folder=run_folder, goes_on=goes_on)
    return _first_whole(value, newest, run_folder=run_folder, goes_on=goes_on)


def _missing_text(path: Path) -> str:
    if path.is_file():
        return f"is a file; {_EXPECTED}"
    if path.is_symlink():
        return f"is a link that leads nowhere{_content(path.parent)}; {_EXPECTED}"
    parent = next(parent for parent in path.parents if parent.exists())
    wanted = path.relative_to(parent).parts[0]
    known = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = nearest(wanted, known)
    hint = f"; did you mean {show(parent / near)}?" if near else _content(parent)
    return f"there is no such folder{hint}; {_EXPECTED}"


def _single(path: Path) -> Path | str | None:
    """Returns the checkpoint that a path stands for, what is wrong with it, or None for a folder of several."""
    if path.is_symlink() and path.name in (LAST, BEST):
        return pointed_to(path.parent, path.name) or f"leads to no checkpoint beside it{_content(path.parent)}"
    if is_name(path.name):
        return path
    real = path.resolve()
    return real if is_name(real.name) else None


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


# --- what is there


def _steps(folder: Path) -> list[Path]:
    """Returns the checkpoints by name, the newest first; unlike `checkpoints.find_all` those without a manifest too."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if is_name(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def _content(folder: Path) -> str:
    """Returns "; it holds ...": checkpoints, else runs that have some, else nothing."""
    if not folder.is_dir():
        return ", for there is no such folder"
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if steps := _steps(place):
        return f"; {show(place)} has {_names(steps)}"
    runs = sorted((path.parent for path in folder.glob(f"*/{FOLDER}") if _steps(path)), reverse=True)
    return f"; runs with checkpoints in {show(folder)}: {_names(runs)}" if runs else ""


def _names(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:_NUM_NAMED]) + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")


def _only(value: str, path: Path, *, run_folder: Path, goes_on: bool) -> Found:
    """A checkpoint that was asked for by its own name is not replaced by another one."""
    damage = find_damage(path, digests=False)
    if damage is None:
        return Found(resumption=Resumption(candidates=[path], run_folder=run_folder, goes_on=goes_on))
    others = [other for other in _steps(path.parent) if other != path and is_checkpoint(other)]
    hint = f"give another one ({_names(others)}), or the run folder" if others else "give another one"
    return Found(problems=[f"resume={value}: {damage}; {hint}"])


def _first_whole(value: str, ordered: list[Path], *, run_folder: Path, goes_on: bool) -> Found:
    damages = {path: find_damage(path, digests=False) for path in ordered}
    whole = [path for path, damage in damages.items() if damage is None]
    if not whole:
        place, found = show(ordered[0].parent), "; ".join(damage for damage in damages.values() if damage is not None)
        text = f"resume={value}: no checkpoint in {place} is whole ({found})"
        hint = "to start from the beginning, move that folder away, or give another hydra.run.dir"
        return Found(problems=[f"{text}; {hint}"])
    skipped = [damage for path, damage in damages.items() if damage and ordered.index(path) < ordered.index(whole[0])]
    return Found(
        resumption=Resumption(candidates=whole, run_folder=run_folder, goes_on=goes_on),
        warnings=[f"{damage}; goes on from {show(whole[0])} instead" for damage in skipped],
    )
