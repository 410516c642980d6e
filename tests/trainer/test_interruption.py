"""What a signal asks for is done by all ranks at the end of the step: saved, or saved and ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.interruption import heed
from trainer.signals import Requests, Terminated


class NotedSaver:
    """Notes what it is asked for."""

    def __init__(self, *, is_writing: bool = False, problem: str | None = None) -> None:
        self.is_writing, self.problem = is_writing, problem
        self.asked: list[Any] = []

    def poll(self, trainer: Any, *, anyone_writes: bool) -> None:
        self.asked.append(("poll", anyone_writes))

    def save(self, trainer: Any, *, wait: bool = False) -> None:
        self.asked.append(("save", wait))


def ask(requests: Requests, saver: NotedSaver | None, *, between_steps: bool = True) -> list[Any]:
    """Returns what the saver was asked for."""
    trainer: Any = SimpleNamespace(saver=saver, device=torch.device("cpu"), is_main=True)
    heed(requests, trainer=trainer, between_steps=between_steps)
    return [] if saver is None else saver.asked


@pytest.mark.parametrize("is_writing", [False, True])
def test_without_a_request_only_what_is_written_is_looked_at(is_writing: bool):
    assert ask(Requests(), NotedSaver(is_writing=is_writing)) == [("poll", is_writing)]
    assert ask(Requests(), NotedSaver(is_writing=is_writing), between_steps=False) == []


def test_a_request_to_save_is_met_once_and_the_run_goes_on():
    requests = Requests(save=True)

    assert ask(requests, NotedSaver()) == [("poll", False), ("save", True)]
    assert not requests.save
    assert ask(requests, NotedSaver()) == [("poll", False)]


def test_within_a_validation_a_request_to_save_waits():
    requests = Requests(save=True)

    assert ask(requests, NotedSaver(), between_steps=False) == []
    assert requests.save


@pytest.mark.parametrize("between_steps", [True, False])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_request_to_end_saves_and_then_ends_the_run(number: int, kind: type[BaseException], between_steps: bool):
    requests, saver = Requests(stop=number), NotedSaver()

    with pytest.raises(KeyboardInterrupt) as caught:
        ask(requests, saver, between_steps=between_steps)

    assert type(caught.value) is kind
    assert saver.asked[-1] == ("save", True) and requests.stop == 0  # nobody else acts on it again


def test_a_run_that_is_not_saved_ends_at_once():
    with pytest.raises(Terminated):
        ask(Requests(stop=signal.SIGTERM), None)
    assert ask(Requests(save=True), None) == []


def test_a_run_that_ends_unsaved_says_why():
    with pytest.raises(RuntimeError, match="no space"):
        ask(Requests(stop=signal.SIGTERM), NotedSaver(problem="no space"))
