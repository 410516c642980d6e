"""What the trainer asks of a logger; loggers exist on rank 0 only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Receives a run's numbers. A logger never stops a run and never asks a question."""

    def start(
        self, *, folder: Path, config: Mapping[str, Any], name: str, position: Mapping[str, int] | None = None
    ) -> None:
        """Opens the log in the run's folder.

        Args:
            config: The resolved configuration as plain containers.
            position: None for a new log. Else what `position()` returned when the checkpoint was saved from which the
                run goes on, or {} where it starts afresh in the folder of an earlier attempt: as far as the log can,
                it takes back what was written later.
        """

    def position(self) -> dict[str, int]:
        """Returns how far the log is now, for `start`; never {}. Between steps, and cheap."""

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Writes numbers by their full names (train/loss, val/forward_kl...)."""

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        """Writes a table of text, such as samples."""

    def close(self, *, status: str) -> None:
        """Ends the log; status is completed, stopped, interrupted or failed."""
