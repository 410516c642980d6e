"""Writes a run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer.loggers.safety import Fuse
from trainer.redact import without_secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10
FOLDER = "tensorboard"
NOTHING = -1  # the last step of a log in which there is none


class TensorBoardLogger:
    """Writes scalars, tables and the configuration to `tensorboard/` in the run's folder.

    A resumed run writes a further file, which tells TensorBoard to hide the later steps of those before it.
    """

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._last_step = NOTHING
        self._fuse = Fuse("TensorBoard")

    def start(
        self, *, folder: Path, config: Mapping[str, Any], name: str, position: Mapping[str, int] | None = None
    ) -> None:
        with self._fuse.guard("starting"):
            from torch.utils.tensorboard import SummaryWriter

            if position is not None:
                self._last_step = position.get("step", NOTHING)
            if position == {}:
                _remove_events(folder / FOLDER)
            purge = self._last_step + 1 if position else None
            self._writer = SummaryWriter(str(folder / FOLDER), purge_step=purge, flush_secs=FLUSH_SECONDS)
            text = yaml.safe_dump(without_secrets(config), sort_keys=False)
            self._writer.add_text("config", f"```yaml\n{text}```", max(self._last_step, 0))

    def position(self) -> dict[str, int]:
        if self._writer is not None and not self._fuse.is_blown:
            with self._fuse.guard("writing"):
                self._writer.flush()
        return {"step": self._last_step}

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._writer is None or self._fuse.is_blown:
            return
        with self._fuse.guard("writing"):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._last_step = max(self._last_step, step)

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        if self._writer is None or self._fuse.is_blown:
            return
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)
        with self._fuse.guard("writing"):
            self._writer.add_text(name, table, step)
            self._last_step = max(self._last_step, step)

    def close(self, *, status: str) -> None:
        if self._writer is None:
            return
        with self._fuse.guard("closing"):
            self._writer.close()


def _remove_events(folder: Path) -> None:
    for file in folder.glob("events.out.tfevents.*"):
        file.unlink()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
