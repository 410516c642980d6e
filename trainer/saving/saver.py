"""Writes a run's checkpoints, all ranks together: when one is due, how long training waits, and what if it fails."""

from __future__ import annotations

import difflib
import logging
import math
import shutil
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import distributed
from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life
from trainer.saving import checkpoints
from trainer.saving.checkpoints import CheckpointError, CheckpointPlan
from trainer.saving.content import Content, take, versions
from trainer.saving.plain_state import pack

if TYPE_CHECKING:
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Outcome:
    """What became of one rank's files."""

    problem: str | None = None
    files: dict[str, Any] | None = None


class Saver:
    """Saves the state of a trainer into the checkpoints of its run's folder.

    A checkpoint that cannot be written costs the run nothing: it says so, keeps the older ones and goes on; `problem`
    then tells why until one succeeds. Every method but `is_writing` must be called by all ranks.
    """

    def __init__(self, plan: CheckpointPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder / checkpoints.FOLDER
        self.problem: str | None = None
        self.last: Path | None = None  # the newest checkpoint of this process
        self._step: int | None = None  # of it, or of the one that the run goes on from
        self._writing: _Writing | None = None

    # Before the first step -------------------------------------------------------------------------------------------

    def check_goal(self, trainer: MultiModelTrainer) -> None:
        """Raises ConfigError where the run that goes on would end before it begins, or lacks the monitored metric."""
        if trainer.global_step > trainer.last_step:
            raise ConfigError(
                f"the checkpoint is of step {trainer.global_step}, but the run ends at {trainer.last_step}"
            )
        metrics = trainer.metrics_of(trainer.global_step) or trainer.before
        if metrics:
            self.check_monitor(metrics)

    def check_folder(self) -> None:
        """Raises ConfigError where another run has left checkpoints, which would be taken for this one's."""
        if distributed.from_main(bool(checkpoints.find_all(self.folder))):
            raise ConfigError(
                f"{self.folder} holds the checkpoints of an earlier run; give another folder, or go on with that run: "
                "fit(..., resume=<its folder>)"
            )

    def go_on_from(self, path: Path) -> None:
        """Takes note of the checkpoint that the run goes on from; those of later steps in its folder are superseded."""
        if path.parent != self.folder.resolve():
            return
        self.last, self._step = path, checkpoints.step_of(path)
        if distributed.is_main():
            checkpoints.set_aside(checkpoints.newer_than(path), why="superseded")

    def check_state(self, trainer: MultiModelTrainer) -> None:
        """Raises TypeError, before the first step, for a callback's or the task's state that cannot be saved.

        And ConfigError for a monitored metric without a validation that would tell it.
        """
        if self.plan.monitor is not None and trainer.validation_loader is None:
            raise ConfigError(f"checkpoint.monitor={self.plan.monitor}: no validation gives it; give data.validation")
        states = {f"callbacks.{name}.state_dict()": callback.state_dict for name, callback in trainer.callbacks.items()}
        for name, state_dict in {**states, "the task's state_dict()": trainer.task.state_dict}.items():
            try:
                pack(state_dict(), {}, name=name)
            except RecursionError:
                raise TypeError(f"{name} holds itself, or is too deep for a checkpoint") from None

    def check_monitor(self, metrics: dict[str, float]) -> None:
        """Raises ConfigError unless the metric that decides which checkpoint is best is one of a validation's."""
        monitor = self.plan.monitor
        if monitor is None or monitor in metrics:
            return
        near = difflib.get_close_matches(monitor, metrics, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(metrics)) or 'none'}"
        raise ConfigError(f"checkpoint.monitor={monitor} is no metric of the validation; {hint}")

    # When ------------------------------------------------------------------------------------------------------------

    def is_due(self, trainer: MultiModelTrainer) -> bool:
        """Returns whether the step that just ended, with its validation, asks for a checkpoint."""
        if self.plan.every is not None and trainer.global_step % self.plan.every == 0:
            return True
        metrics = trainer.metrics_of(trainer.global_step)
        return self.plan.monitor is not None and bool(metrics) and self._is_among_best(metrics[self.plan.monitor])

    def _is_among_best(self, value: float) -> bool:
        assert self.plan.monitor is not None
        better = False
        if distributed.is_main() and math.isfinite(value):
            scores = checkpoints.scores(self.folder, self.plan.monitor)
            best = [scores[path] for path in self.plan.ranked(scores)[: self.plan.keep_best]]
            sign = 1 if self.plan.mode == "min" else -1
            better = self.plan.keep_best > 0 and (len(best) < self.plan.keep_best or sign * value < sign * best[-1])
        return bool(distributed.from_main(better))

    # What ------------------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes in the background."""
        return self._writing is not None and self._writing.is_alive()

    def save(self, trainer: MultiModelTrainer, *, wait: bool = False) -> None:
        """Saves the trainer as it is, unless its step is saved already.

        Args:
            wait: Until it is on the disk, whatever the plan says.
        """
        self.finish(trainer)
        if self._step == trainer.global_step:
            return
        began, step = time.monotonic(), trainer.global_step
        trainer.emit("on_save_start", step=step)
        try:
            writing = self._begin(trainer)
            if wait or not self.plan.background:
                what = f"writing {checkpoints.name_of(step)} ({writing.gigabytes:.2f} GB)"
                with sign_of_life(what) if trainer.is_main else nullcontext():
                    writing.run()
                self._end(trainer, writing, waited=time.monotonic() - began)
            else:
                self._writing = writing.in_background(began)
        except CheckpointError as error:
            self._fail(error, step=step)
        trainer.emit("on_save_end", path=self.last if self._step == step else None)

    def poll(self, trainer: MultiModelTrainer, *, anyone_writes: bool) -> None:
        """Makes what was written in the background a checkpoint, once all ranks have written their part."""
        if self._writing is not None and not anyone_writes:
            self.finish(trainer)

    def finish(self, trainer: MultiModelTrainer) -> None:
        """Waits for what is written in the background."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        with sign_of_life("writing the checkpoint") if trainer.is_main else nullcontext():
            writing.join()
        try:
            self._end(trainer, writing, waited=writing.copied_in)
        except CheckpointError as error:
            self._fail(error, step=writing.step)

    def note(self, trainer: MultiModelTrainer, metrics: dict[str, float]) -> None:
        """Notes the validation of the step that is saved, and keeps the best."""
        if trainer.is_main and self.last is not None and self._step == trainer.global_step:
            self._keep(self.last, metrics)

    def _keep(self, path: Path, metrics: dict[str, float]) -> None:
        """Notes a checkpoint's validation and deletes those that the plan does not keep; on rank 0."""
        try:
            if metrics:
                checkpoints.score(path, metrics)
            checkpoints.retain(self.folder, self.plan)
        except OSError as error:  # the checkpoint itself is whole
            log.warning("cannot tidy up %s (%s); trying again after the next checkpoint", self.folder, error)

    def _begin(self, trainer: MultiModelTrainer) -> _Writing:
        content, problem = Content(), None
        try:
            content = take(trainer)
            if self.plan.background:
                content = content.copied()
        except Exception as error:
            log.info("taking the state of the run failed", exc_info=True, extra={"file_only": True})
            problem = str(error) or repr(error)
        found = distributed.gather((problem, content.num_bytes))
        _agree([text for text, _ in found])
        staged = self._stage(trainer, needed=sum(size for _, size in found)) if trainer.is_main else None
        problem, place = distributed.from_main(staged)
        _agree([problem])
        return _Writing(content, Path(place), step=trainer.global_step)

    def _stage(self, trainer: MultiModelTrainer, *, needed: int) -> tuple[str | None, str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                return f"it takes {needed / 1e9:.2f} GB, and {self.folder} has {free / 1e9:.2f} GB left", ""
            return None, str(checkpoints.stage(self.folder, trainer.global_step))
        except OSError as error:
            return str(error), ""

    def _end(self, trainer: MultiModelTrainer, writing: _Writing, *, waited: float) -> None:
        outcomes = distributed.gather(writing.outcome)
        problem = None
        if trainer.is_main:
            problem = self._commit(trainer, writing, outcomes)
        _agree([distributed.from_main(problem)])
        self.problem, self._step = None, writing.step
        self.last = self.folder / checkpoints.name_of(writing.step)
        log.info(
            "checkpoint %s: %.2f GB in %.1f s; training waited %.1f s",
            self.last.name,
            sum(facts["bytes"] for outcome in outcomes for facts in outcome.files.values()) / 1e9,
            time.monotonic() - writing.began,
            waited,
        )

    def _commit(self, trainer: MultiModelTrainer, writing: _Writing, outcomes: list[_Outcome]) -> str | None:
        facts = {
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "world_size": trainer.world_size,
            "versions": versions(),
        }
        try:
            _agree([outcome.problem for outcome in outcomes])
            files = {name: of for outcome in outcomes for name, of in (outcome.files or {}).items()}
            path = checkpoints.commit(writing.staged, step=writing.step, files=files, facts=facts)
        except (CheckpointError, OSError) as error:
            shutil.rmtree(writing.staged, ignore_errors=True)
            return str(error)
        self._keep(path, trainer.metrics_of(writing.step))
        return None

    def _fail(self, error: CheckpointError, *, step: int) -> None:
        self.problem = f"the checkpoint of step {step} could not be written: {error}"
        if distributed.is_main():
            log.error("%s; the older ones are as they were, and the run goes on", self.problem)


class _Writing:
    """One rank's part of a checkpoint on its way to the disk."""

    def __init__(self, content: Content, staged: Path, *, step: int) -> None:
        self.content, self.staged, self.step = content, staged, step
        self.outcome = _Outcome(problem="it was never written")
        self.began, self.copied_in = time.monotonic(), 0.0
        self._thread: threading.Thread | None = None

    @property
    def gigabytes(self) -> float:
        """The size of this rank's part."""
        return self.content.num_bytes / 1e9

    def run(self) -> None:
        """Writes it."""
        try:
            names = self.content.write(self.staged)
            self.outcome = _Outcome(files=checkpoints.describe_files(self.staged, names))
        except Exception as error:
            log.info("writing a checkpoint failed", exc_info=True, extra={"file_only": True})
            self.outcome = _Outcome(problem=f"rank {distributed.rank()}: {error or repr(error)}")
        self.content = Content()  # the copies, where there are any

    def in_background(self, began: float) -> _Writing:
        """Writes it in a thread, and says so."""
        self.copied_in = time.monotonic() - began
        self._thread = threading.Thread(target=self.run, name="checkpoint")  # no daemon: the interpreter waits for it
        self._thread.start()
        return self

    def is_alive(self) -> bool:
        """Returns whether it is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end of it."""
        if self._thread is not None:
            self._thread.join()


def _agree(problems: list[str | None]) -> None:
    """Raises CheckpointError for the first problem."""
    problem = next((text for text in problems if text is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
