"""Writes a run's numbers to metrics.jsonl, one object per kind and step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.loggers.safety import Fuse


class JsonlLogger:
    """Appends to `metrics.jsonl` and, for tables, to `<name>.jsonl` in the run's folder.

    Training (train/... and perf/...) and validation (val/...) are two objects, also of the same step. JSON has no NaN
    and no infinity: such a value is written as null. Every line is on disk when the call returns.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._fuse = Fuse("metrics.jsonl")

    def start(self, *, folder: Path, config: Mapping[str, Any], name: str) -> None:
        self._folder = folder
        with self._fuse.guard("opening"):
            (folder / "metrics.jsonl").touch()

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        training = {name: value for name, value in metrics.items() if name not in validation}
        records = [{"step": step, **_finite(kind)} for kind in (training, validation) if kind]
        self._append("metrics.jsonl", records)

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        self._append(f"{name}.jsonl", [{"step": step, **dict(zip(columns, row, strict=True))} for row in rows])

    def close(self, *, status: str) -> None:
        """Has nothing to close: every call opens the file anew, so that a crash loses no line."""

    def _append(self, file_name: str, records: Sequence[Mapping[str, Any]]) -> None:
        if self._fuse.is_blown:
            return
        with self._fuse.guard("writing"), (self._folder / file_name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
