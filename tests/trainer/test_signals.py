"""Signals: the first to end a run waits for the end of the step, the second does not, and none is lost."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer import signals
from trainer.signals import SaveNote, Terminated, deferred

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers as the entry point sets them; as before afterwards."""
    monkeypatch.delenv("RANK", raising=False)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGTERM, signals.raise_terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, SaveNote())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_body_finish_and_is_raised_at_its_end(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
):
    handlers = [signal.getsignal(each) for each in NUMBERS]
    seen = []

    def body() -> None:
        with deferred() as requests:
            signal.raise_signal(number)
            seen.append(requests.stop)

    with pytest.raises(KeyboardInterrupt, match=number.name) as caught:
        body()

    assert seen == [number]
    assert type(caught.value) is (Terminated if number == signal.SIGTERM else KeyboardInterrupt)
    assert [signal.getsignal(each) for each in NUMBERS] == handlers
    assert caplog.messages == [
        f"{number.name}: finishing this step, then saving; once more ends the run at once",
    ]


def test_a_stop_that_was_taken_is_not_raised_again_and_an_error_of_the_body_comes_first():
    with deferred() as requests:
        signal.raise_signal(signal.SIGTERM)
        assert requests.take() == signal.SIGTERM
        assert requests.take() == 0

    def fail() -> None:
        with deferred():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        fail()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_second_signal_ends_the_body_at_once(is_taken: bool):
    def body() -> None:
        with deferred() as requests:
            signal.raise_signal(signal.SIGTERM)
            if is_taken:  # while it is being saved
                requests.take()
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt) as caught:
        body()

    assert type(caught.value) is KeyboardInterrupt


def test_a_launchers_echo_of_the_same_signal_is_not_the_second(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")

    with deferred() as requests:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        requests.take()
        monkeypatch.setattr(signals, "_ECHO_SECONDS", 0.0)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_sigusr1_asks_for_a_save_also_before_the_body():
    signal.raise_signal(signal.SIGUSR1)
    with deferred() as early:
        assert early.save

    with deferred() as requests:
        assert not requests.save, "asked for once"
        signal.raise_signal(signal.SIGUSR1)
        assert requests.save
    assert requests.stop == 0


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a shell does for a job in the background

    with deferred() as requests:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert requests.stop == 0
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_process_that_was_forked_in_the_body_is_not_the_run():
    with deferred() as requests:
        child = os.fork()
        if child == 0:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGUSR1):
                signal.raise_signal(number)
            os._exit(requests.stop or int(requests.save))
        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def test_outside_of_the_main_thread_nothing_is_touched():
    seen = []

    def body() -> None:
        with deferred() as requests:
            seen.extend([requests.stop, requests.save, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()

    assert seen == [0, False, signals.raise_terminated]


def test_without_a_handler_the_second_sigterm_does_what_it_does_to_any_process():
    code = """
import signal
from trainer.signals import deferred
with deferred():
    signal.raise_signal(signal.SIGTERM)
    print("on", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("alive", flush=True)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "on\n")
