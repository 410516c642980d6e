"""Shows how far a run is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from trainer.callbacks.callback import Callback
from trainer.heartbeat import SILENCE_SECONDS, Heartbeat
from trainer.report import is_of_group

if TYPE_CHECKING:
    from trainer.task import Batch, TaskModule
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)

PERF_FORMATS = {
    "perf/tokens_per_s": "{:.0f} tok/s",
    "perf/examples_per_s": "{:.1f} examples/s",
    "perf/step_time": "{:.3g} s/step",
    "perf/memory_gb": "{:.2f} GB",
}


class ProgressBar(Callback):
    """Shows step, losses of all models, speed and time left, on rank 0.

    On a terminal a live bar, with one row of numbers per model; elsewhere a line per log step, and one at least every
    five seconds while a step or a validation lasts. The lines of log steps stand in run.log in both cases.
    """

    order = 90  # after those who add to the metrics of a step

    def __init__(self, *, every_seconds: float = SILENCE_SECONDS) -> None:
        self.every_seconds = every_seconds
        self._clock = Clock()
        self._activity: str | None = None
        self._metrics: dict[str, float] = {}
        self._models: list[str] = []
        self._heartbeat: Heartbeat | None = None
        self._live: Live | None = None
        self._bar: Progress | None = None

    # Steps -----------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._models = list(trainer.models)
        self._open(trainer, total=trainer.last_step)

    def on_train_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._clock.start()

    def on_train_step_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        self._activity = f"step {step}/{trainer.last_step}"

    def on_train_batch_end(
        self, trainer: MultiModelTrainer, task: TaskModule, output: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.gradient_accumulation_steps > 1:
            step = f"step {trainer.global_step + 1}/{trainer.last_step}"
            self._activity = f"{step}, {batch_idx + 1} of {trainer.gradient_accumulation_steps} micro-batches done"

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self._clock.step_ended()
        if not trainer.is_main:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=trainer.global_step)
        if trainer.is_log_step:
            self._metrics = dict(metrics)
            self._report(self._step_line(trainer, metrics))

    def on_train_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._activity = None

    def _step_line(self, trainer: MultiModelTrainer, metrics: dict[str, float]) -> str:
        parts = [f"step {trainer.global_step}/{trainer.last_step}", *format_metrics(metrics)]
        left = self._clock.seconds_left(trainer)
        return "  ".join(parts if left is None else [*parts, f"time left {duration(left)}"])

    def on_save_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        self._clock.pause()
        self._activity = None  # whoever writes tells what takes long

    def on_save_end(self, trainer: MultiModelTrainer, task: TaskModule, path: Path | None) -> None:
        self._clock.go_on()

    # Validations -----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._clock.pause()
        self._activity = f"validation at step {trainer.global_step}"
        if self._heartbeat is None and self._live is None:  # a run that only validates
            self._open(trainer, total=None)

    def on_validation_batch_end(
        self, trainer: MultiModelTrainer, task: TaskModule, batch: Batch, batch_idx: int
    ) -> None:
        self._activity = f"validation at step {trainer.global_step}, {batch_idx + 1} batches done"

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self._clock.validation_ended()
        self._activity = None
        if trainer.is_main:
            shown = {name: value for name, value in metrics.items() if not is_of_group(name)}
            parts = [f"{name.removeprefix('val/')} {value:.4g}" for name, value in shown.items()]
            self._report("  ".join([f"validation at step {trainer.global_step}", *parts]), also_when_live=True)

    # Start and end ---------------------------------------------------------------------------------------------------

    def on_fit_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._close()

    def on_exception(self, trainer: MultiModelTrainer, task: TaskModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        self._close()

    def _open(self, trainer: MultiModelTrainer, *, total: int | None) -> None:
        if not trainer.is_main:
            return
        # The console that the log's handler writes to: only then do log lines go above the bar instead of through it.
        console = rich.get_console()
        if not console.is_terminal or console.is_dumb_terminal:
            self._heartbeat = Heartbeat(self._describe, every_seconds=self.every_seconds)
            return
        if total is not None:
            columns = (SpinnerColumn(), TextColumn("step"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=console, auto_refresh=False)
            self._bar.add_task("step", total=total, completed=trainer.global_step)
        self._live = Live(
            get_renderable=lambda: self._render(trainer), console=console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._live is not None:
            self._live.stop()
        self._heartbeat = self._live = self._bar = None

    def _report(self, line: str, *, also_when_live: bool = False) -> None:
        log.info("%s", line, extra={"file_only": self._live is not None and not also_when_live})
        if self._heartbeat is not None:
            self._heartbeat.reset()

    def _describe(self) -> str | None:
        return None if self._activity is None else f"{self._activity} ..."

    def _render(self, trainer: MultiModelTrainer) -> RenderableType:
        left = self._clock.seconds_left(trainer)
        status = [self._activity or "", "" if left is None else f"time left {duration(left)}"]
        lines = ["  ".join(status), *format_rows(self._metrics, self._models)]
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*([] if self._bar is None else [self._bar]), *texts)


class Clock:
    """Tells the time left from the steps and validations so far."""

    def __init__(self) -> None:
        self.num_steps, self.step_seconds, self.validation_seconds = 0, 0.0, 0.0
        self._step_began = self._paused_at = time.monotonic()

    def start(self) -> None:
        """The first step begins."""
        self._step_began = time.monotonic()

    def step_ended(self) -> None:
        """A step ended and the next begins; the first is not counted once there are others, since it warms up."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        if self.num_steps == 1:
            self.step_seconds = seconds
        else:
            self.step_seconds += seconds
        self.num_steps += 1

    def pause(self) -> None:
        """What follows is no part of a step."""
        self._paused_at = time.monotonic()

    def go_on(self) -> float:
        """Ends the pause and returns its seconds."""
        seconds = time.monotonic() - self._paused_at
        self._step_began += seconds
        return seconds

    def validation_ended(self) -> None:
        """Ends the pause of a validation."""
        self.validation_seconds = self.go_on()

    def seconds_left(self, trainer: MultiModelTrainer) -> float | None:
        """Returns the seconds for the steps and validations to come, None before the first step ended."""
        if self.num_steps == 0:
            return None
        per_step = self.step_seconds / max(self.num_steps - 1, 1)
        left = trainer.last_step - trainer.global_step
        every = trainer.val_every or trainer.last_step
        validations = (trainer.last_step - 1) // every - min(trainer.global_step, trainer.last_step - 1) // every + 1
        return per_step * left + self.validation_seconds * validations


def format_metrics(metrics: dict[str, float]) -> list[str]:
    """Returns "loss 1.234", "student/forward_kl 1.1", ..., "512 tok/s" in a fixed order, losses first."""
    train = [name for name in metrics if not name.startswith("perf/") and not _is_plain_count(name, metrics[name])]
    train.sort(key=lambda name: (name != "train/loss", name.endswith(("/lr", "/grad_norm"))))
    perf = [PERF_FORMATS[name].format(metrics[name]) for name in PERF_FORMATS if name in metrics]
    return [f"{name.removeprefix('train/')} {metrics[name]:.4g}" for name in train] + perf


def _is_plain_count(name: str, value: float) -> bool:
    """Returns whether a number is there for the files only: counts of updates, unless some were skipped."""
    return name.endswith("/updates") or (name.endswith("/skipped_updates") and value == 0)


def format_rows(metrics: dict[str, float], models: list[str]) -> list[str]:
    """Returns a row of numbers per model that has any, and one for all the rest."""
    rows = []
    rest = dict(metrics)
    for model in models:
        own = {f"train/{name.removeprefix(f'train/{model}/')}": rest.pop(name) for name in _names_of(model, metrics)}
        if own:
            rows.append("  ".join([model, *format_metrics(own)]))
    return ["  ".join(format_metrics(rest)), *rows] if rest else rows


def _names_of(model: str, metrics: dict[str, float]) -> list[str]:
    return [name for name in metrics if name.startswith(f"train/{model}/")]


def duration(seconds: float) -> str:
    """Returns seconds as h:mm:ss."""
    minutes, seconds_left = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}"
