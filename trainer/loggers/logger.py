"""What the trainer asks of a logger; loggers exist on rank 0 only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Receives a run's numbers. A logger never stops a run and never asks a question."""

    def start(self, *, folder: Path, config: Mapping[str, Any], name: str) -> None:
        """Opens the log in the run's folder; `config` is the resolved configuration as plain containers."""

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes numbers by their full names (train/loss, val/forward_kl...)."""

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        """Writes a table of text, such as samples."""

    def close(self, *, status: str) -> None:
        """Ends the log; status is completed, stopped, interrupted or failed."""
