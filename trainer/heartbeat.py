"""A sign of life for whatever may take longer than a user waits in silence."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SILENCE_SECONDS = 4.0  # with a second for the thread to wake up, nobody waits more than five


class Heartbeat:
    """Logs what is going on whenever nothing else was reported for a while, from a thread of its own.

    A thread, since a single micro-batch, validation or generation may take minutes.

    Args:
        describe: Returns the line to log, or None when there is nothing to tell.
    """

    def __init__(self, describe: Callable[[], str | None], *, every_seconds: float = SILENCE_SECONDS) -> None:
        self.describe, self.every_seconds = describe, every_seconds
        self.has_spoken = False
        self._last = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Takes note that something was reported just now."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(min(0.5, self.every_seconds / 4)):
            if time.monotonic() - self._last < self.every_seconds:
                continue
            line = self.describe()
            if line is not None:
                log.info("%s", line)
                self.has_spoken = True
            self.reset()


@contextmanager
def sign_of_life(what: str, *, every_seconds: float = SILENCE_SECONDS) -> Iterator[None]:
    """Logs "<what> ... 12 s" every few seconds for as long as the body runs, and once at the end if it took long."""
    start = time.monotonic()
    heartbeat = Heartbeat(lambda: f"{what} ... {time.monotonic() - start:.0f} s", every_seconds=every_seconds)
    try:
        yield
    finally:
        heartbeat.stop()
        if heartbeat.has_spoken:  # or the silence until the next sign of life would add to this one's
            log.info("%s: %.0f s", what, time.monotonic() - start)
