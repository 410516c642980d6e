"""What SIGTERM, SIGINT and SIGUSR1 mean to a run, and how they wait for the end of a step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

_ECHO_SECONDS = 2.0

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Terminated(KeyboardInterrupt):
    """The run was asked to end by SIGTERM; handled like Ctrl-C, with another exit status."""


@dataclass
class Requests:
    """What was asked by signals while a step ran."""

    stop: int = 0  # the number of the signal that asks the run to end
    save: bool = False  # SIGUSR1: save now and go on; whoever has saved sets it back

    def take(self) -> int:
        """Returns the number of the signal that asks the run to end, which is the caller's to act on from now on."""
        number, self.stop = self.stop, 0
        return number


class SaveNote:
    """Handles SIGUSR1 outside of `deferred`: what came too early is seen by the next `deferred`."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def take(self) -> bool:
        """Returns whether the signal came since the last call."""
        is_set, self.is_set = self.is_set, False
        return is_set


@contextmanager
def deferred() -> Iterator[Requests]:
    """Yields what SIGTERM, SIGINT and SIGUSR1 ask for, while the body goes on; the second to end it does so at once.

    A stop that the body did not take is raised at its end. Does nothing outside of the main thread.
    """
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    # None: not from Python, and cannot be put back. SIG_IGN: whoever started the run means it to go on.
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    note = before.get(signal.SIGUSR1)
    requests.save = isinstance(note, SaveNote) and note.take()
    first: tuple[int, float] | None = None
    owner = os.getpid()

    def note_stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        is_worker = os.getpid() != owner  # forked in the body, to load data: its owner ends it
        if is_worker or (first is not None and _is_echo(number, *first)):
            return
        if first is not None:
            _handle_as_before(before[signal.Signals(number)], number, frame)
        first = number, time.monotonic()
        requests.stop = number
        _say(f"{signal.Signals(number).name}: finishing this step, then saving; once more ends the run at once")

    def note_save(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            requests.save = True
            _say("SIGUSR1: saving after this step")

    try:
        for number in before:
            signal.signal(number, note_save if number == signal.SIGUSR1 else note_stop)
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if requests.stop:
        raise error_of(requests.stop)


def _is_echo(number: int, first: int, at: float) -> bool:
    """Returns whether a launcher hands on what this rank got as well, as from Slurm, which signals all of a job."""
    is_repeated = number == first == signal.SIGTERM and time.monotonic() < at + _ECHO_SECONDS
    return "RANK" in os.environ and is_repeated


def _handle_as_before(handler: Handler, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        with suppress(RuntimeError):  # the signal came while the same stream was being written to
            log.warning(text)


def error_of(number: int) -> KeyboardInterrupt:
    """Returns what a signal that asks the run to end raises."""
    name = signal.Signals(number).name
    return Terminated(name) if number == signal.SIGTERM else KeyboardInterrupt(name)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM as Python handles Ctrl-C."""
    raise error_of(number)
