"""What keeps a logger from harming a run: it fails quietly, and once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Fuse:
    """Turns the first failure of a logger into one warning, after which the logger is off.

    Args:
        name: The logger, as the user knows it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_blown = name, False

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Runs the body; any exception of it ends the logger instead of the run, and only the first is told."""
        try:
            yield
        except Exception as error:
            log.info("%s: %s failed", self.name, what, exc_info=True, extra={"file_only": True})
            if self.is_blown:
                return
            self.is_blown = True
            reason = str(error).strip().partition("\n")[0]
            log.warning(
                "%s is off for the rest of this run: %s failed (%s: %s); the run goes on",
                self.name,
                what,
                type(error).__name__,
                reason,
            )
