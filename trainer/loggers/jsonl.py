"""Writes a run's numbers to metrics.jsonl, one object per kind and step."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.loggers.safety import Fuse

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
INDEX = ".jsonl_files"  # names the files that are this logger's: others in the folder are not its to cut
_NAME = re.compile(r"[^/\\\0\n]+\.jsonl")  # within the folder, whatever a checkpoint says
_BLOCK = 1 << 16


class JsonlLogger:
    """Appends to `metrics.jsonl` and, for tables, to `<name>.jsonl` in the run's folder.

    Training (train/... and perf/...) and validation (val/...) are two objects, also of the same step. JSON has no NaN
    and no infinity: such a value is written as null. Every line is handed to the system when the call returns, and is
    on disk when `position` does; a line that is not whole is cut off, at once or at the next start.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._sizes: dict[str, int] = {}  # file to the bytes of its whole lines
        self._unsynced: set[str] = set()
        self._fuse = Fuse(METRICS)

    def start(
        self, *, folder: Path, config: Mapping[str, Any], name: str, position: Mapping[str, int] | None = None
    ) -> None:
        self._folder = folder
        with self._fuse.guard("opening"):
            (folder / METRICS).touch()
            known = {file for file in position or {} if _NAME.fullmatch(file)}
            short = []
            for file in sorted({METRICS, *self._indexed(), *known}):
                wanted = None if position is None else position.get(file, 0)
                if self._take_back(file, wanted) < (wanted or 0):
                    short.append(file)
            if short:
                log.warning(
                    "%s: shorter than when the checkpoint was saved, so lines are missing; the log goes on at the end",
                    ", ".join(short),
                )

    def position(self) -> dict[str, int]:
        with self._fuse.guard("writing to disk"):
            while self._unsynced:
                with (self._folder / self._unsynced.pop()).open("rb") as file:
                    os.fsync(file.fileno())
        return {METRICS: 0, **self._sizes}

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        training = {name: value for name, value in metrics.items() if name not in validation}
        records = [{"step": step, **_finite(kind)} for kind in (training, validation) if kind]
        self._append(METRICS, records)

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        records = [{"step": step, **dict(zip(columns, row, strict=True))} for row in rows]
        self._append(f"{name.replace('/', '_')}.jsonl", records)

    def close(self, *, status: str) -> None:
        """Has nothing to close: every call opens the file anew, so that a crash loses no line."""

    def _append(self, file: str, records: Sequence[Mapping[str, Any]]) -> None:
        if self._fuse.is_blown:
            return
        with self._fuse.guard("writing"):
            lines = b"".join(map(_line, records))
            if file not in self._sizes:
                _write(self._folder / INDEX, f"\n{file}\n".encode())  # apart from what a kill may have left half
                self._sizes[file] = self._take_back(file, None)
            try:
                _write(self._folder / file, lines)
            except OSError:
                self._take_back(file, self._sizes[file])
                raise
            self._sizes[file] += len(lines)
            self._unsynced.add(file)

    def _indexed(self) -> list[str]:
        index = self._folder / INDEX
        names = index.read_text(encoding="utf-8", errors="replace").splitlines() if index.exists() else []
        return [name for name in names if _NAME.fullmatch(name) and (self._folder / name).is_file()]

    def _take_back(self, file: str, size: int | None) -> int:
        """Cuts a file to whole lines of at most so many bytes, all where None; returns how many bytes these are.

        A table of which nothing is left goes.
        """
        path = self._folder / file
        if not path.exists():
            return 0
        end = path.stat().st_size
        whole = _end_of_line(path, end if size is None else min(size, end))
        if whole < end:
            os.truncate(path, whole)
        if size == 0 and file != METRICS:
            path.unlink()
            self._sizes.pop(file, None)
        else:
            self._sizes[file] = whole
        return whole


def _line(record: Mapping[str, Any]) -> bytes:
    # A model may say half a surrogate pair, which UTF-8 lacks: escaped, it is JSON all the same.
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def _write(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def _end_of_line(path: Path, end: int) -> int:
    """Returns the byte after the last line break before `end`, 0 without one."""
    with path.open("rb") as file:
        while end > 0:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
