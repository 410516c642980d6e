import io
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from rich.console import Console

from trainer.callbacks import ProgressBar
from trainer.callbacks.progress import Clock, duration, format_metrics, format_rows
from trainer.outputs import ConsoleHandler

METRICS = {
    "train/student/forward_kl": 1.1,
    "train/student/lr": 1e-4,
    "train/loss": 1.23456,
    "perf/tokens_per_s": 512.4,
}


def stand_in(**changes: Any) -> Any:
    values = {
        "is_main": True,
        "is_log_step": True,
        "models": {"student": None, "teacher": None},
        "global_step": 0,
        "max_steps": 40,
        "last_step": 40,
        "val_every": None,
        "gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**values | changes)


@pytest.fixture
def terminal() -> Iterator[io.StringIO]:
    """A terminal of 100 columns as rich's global console."""
    known = rich.get_console().__dict__.copy()
    written = io.StringIO()
    rich.get_console().__dict__ = Console(file=written, force_terminal=True, width=100, height=30).__dict__
    yield written
    rich.get_console().__dict__ = known


def one_step(bar: ProgressBar, trainer: Any, metrics: dict[str, float]) -> None:
    bar.on_train_step_start(trainer, None, trainer.global_step + 1)
    trainer.global_step += 1
    bar.on_train_step_end(trainer, None, metrics)


def test_log_steps_are_plain_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bar, trainer = ProgressBar(), stand_in(global_step=9)

    bar.on_fit_start(trainer, None)
    bar.on_train_start(trainer, None)
    one_step(bar, trainer, METRICS)
    trainer.is_log_step = False
    one_step(bar, trainer, {})
    bar.teardown(trainer, None, "fit")

    assert caplog.messages == [
        "step 10/40  loss 1.235  student/forward_kl 1.1  student/lr 0.0001  512 tok/s  time left 0:00:00"
    ]


def test_a_slow_step_and_a_slow_validation_give_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bar, trainer = ProgressBar(every_seconds=0.05), stand_in(global_step=6, gradient_accumulation_steps=8)

    bar.on_fit_start(trainer, None)
    time.sleep(0.2)
    assert caplog.messages == []  # nothing goes on yet that it could name
    bar.on_train_step_start(trainer, None, 7)
    time.sleep(0.2)
    bar.on_train_batch_end(trainer, None, None, {}, 2)
    time.sleep(0.2)
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end(trainer, None, {}, 2)
    time.sleep(0.2)
    bar.on_validation_end(trainer, None, {"val/loss": 0.5, "val/by_length/1-16/loss": 0.4})
    bar.on_fit_end(trainer, None)

    assert list(dict.fromkeys(caplog.messages)) == [
        "step 7/40 ...",
        "step 7/40, 3 of 8 micro-batches done ...",
        "validation at step 6, 3 batches done ...",
        "validation at step 6  loss 0.5",
    ]


def test_other_ranks_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bar, trainer = ProgressBar(every_seconds=0.05), stand_in(is_main=False)

    bar.on_fit_start(trainer, None)
    one_step(bar, trainer, METRICS)
    bar.on_validation_start(trainer, None)
    time.sleep(0.2)
    bar.on_validation_end(trainer, None, {"val/loss": 0.5})
    bar.on_fit_end(trainer, None)

    assert caplog.messages == []


def test_a_terminal_shows_a_bar_below_whole_log_lines(terminal: io.StringIO) -> None:
    bar, trainer, handler = ProgressBar(), stand_in(), ConsoleHandler(prefix="")
    root = logging.getLogger()
    root.addHandler(handler)
    level, root.level = root.level, logging.INFO
    try:
        bar.on_fit_start(trainer, None)
        bar.on_train_start(trainer, None)
        one_step(bar, trainer, METRICS)
        logging.getLogger("trainer").info("a line of somebody else that is not broken")
        time.sleep(0.4)
        bar.on_exception(trainer, None, RuntimeError())
    finally:
        root.removeHandler(handler)
        root.level = level

    shown = terminal.getvalue()
    assert "1/40" in shown
    assert "student  forward_kl 1.1  lr 0.0001" in shown
    assert "time left" in shown
    assert "a line of somebody else that is not broken\n" in shown
    assert "step 1/40  loss" not in shown  # that line is in run.log only


def test_a_run_that_only_validates_is_seen_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bar, trainer = ProgressBar(every_seconds=0.05), stand_in()

    bar.on_validation_start(trainer, None)
    time.sleep(0.2)
    bar.on_validation_end(trainer, None, {"val/loss": 0.5})
    bar.teardown(trainer, None, "validate")

    assert caplog.messages[0] == "validation at step 0 ..."


def test_the_time_left_counts_steps_after_the_first_and_validations_to_come() -> None:
    clock, trainer = Clock(), stand_in(global_step=4, last_step=10, val_every=5)
    clock.num_steps, clock.step_seconds, clock.validation_seconds = 4, 6.0, 10.0

    assert clock.seconds_left(trainer) == 6 * 2.0 + 2 * 10.0  # validations at step 5 and at the end
    trainer.val_every = None
    assert clock.seconds_left(trainer) == 6 * 2.0 + 10.0


def test_a_validation_is_no_part_of_a_step() -> None:
    clock = Clock()

    clock.start()
    clock.pause()
    time.sleep(0.4)
    clock.validation_ended()
    clock.step_ended()

    assert clock.step_seconds < 0.2 < clock.validation_seconds


def test_numbers_are_shown_losses_first_and_one_row_per_model() -> None:
    assert format_metrics({"train/a/lr": 1.0, "train/a/kl": 2.0, "train/loss": 3.0}) == ["loss 3", "a/kl 2", "a/lr 1"]
    assert format_rows({"train/a/kl": 2.0, "train/loss": 3.0}, ["a", "b"]) == ["loss 3", "a  kl 2"]
    assert duration(3732) == "1:02:12"
