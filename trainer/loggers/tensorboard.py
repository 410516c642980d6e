"""Writes a run's numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer.loggers.safety import Fuse, without_secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10


class TensorBoardLogger:
    """Writes scalars, tables and the configuration to `tensorboard/` in the run's folder."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._fuse = Fuse("TensorBoard")

    def start(self, *, folder: Path, config: Mapping[str, Any], name: str) -> None:
        with self._fuse.guard("starting"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=FLUSH_SECONDS)
            text = yaml.safe_dump(without_secrets(config), sort_keys=False)
            self._writer.add_text("config", f"```yaml\n{text}```", 0)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._writer is None or self._fuse.is_blown:
            return
        with self._fuse.guard("writing"):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        if self._writer is None or self._fuse.is_blown:
            return
        lines = [columns, ["---"] * len(columns), *rows]
        table = "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)
        with self._fuse.guard("writing"):
            self._writer.add_text(name, table, step)

    def close(self, *, status: str) -> None:
        if self._writer is None:
            return
        with self._fuse.guard("closing"):
            self._writer.close()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
