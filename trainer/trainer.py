"""Fits one task over several models: it owns the order of things, the task owns the losses, callbacks the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import distributed, signals
from trainer.callbacks.callback import Callback, HookCaller, check_hook_names
from trainer.config import ConfigError
from trainer.data.identity import identify_sources
from trainer.data.lengths import tell_lengths
from trainer.data.sources import TrainingData, TrainSources, ValidationSources, find_missing_fields, name_sources
from trainer.data.tokenizers import find_vocabulary_problem
from trainer.engines import Engines, Plugin
from trainer.evaluation import evaluate
from trainer.handle import ModelHandle
from trainer.heartbeat import sign_of_life
from trainer.interruption import heed
from trainer.loggers.logger import Logger
from trainer.non_finite import NonFinitePolicy
from trainer.plan import show_plan
from trainer.rollouts import Rollouts, Turn
from trainer.saving.checkpoints import CheckpointPlan, candidates
from trainer.saving.content import Checkpoint, Whole, choose, give_back, horizon_keys
from trainer.saving.digests import digest_fixed
from trainer.saving.saver import Saver
from trainer.seeds import seed_everything
from trainer.specs import ModelSpec, RunFacts, check_task
from trainer.start_weights import build_order
from trainer.step import Step, weigh_nothing
from trainer.task import StepOutput, TaskModule

log = logging.getLogger(__name__)


class MultiModelTrainer:
    """Trains the models of a task, each under its own DeepSpeed plugin.

    After construction the first plugin is the active one; inside hooks it is that of the model concerned.

    Args:
        plugins: Role to a DeepSpeedPlugin, a DeepSpeed configuration, the path of its JSON, or {"replicate": True}.
        max_steps: Global steps (windows of micro-batches) of the run; schedules are laid out over them.
        stop_at_step: Ends the run there without shortening the schedules.
        val_every: Global steps between validations; None: only before the first and after the last.
        non_finite: "stop" or "skip": what a loss or gradient that is NaN or infinite does to the run.
        max_skipped: Updates of one model left out in a row; one more ends the run.
        folder: Where the run leaves what it leaves.
        checkpoint: When the run is saved, in `folder`; None: never.
    """

    def __init__(
        self,
        plugins: Mapping[str, Plugin],
        *,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        stop_at_step: int | None = None,
        val_every: int | None = None,
        log_every: int = 10,
        gradient_accumulation_steps: int = 1,
        limit_val_batches: int | None = None,
        non_finite: str = "stop",
        max_skipped: int = 10,
        seed: int = 0,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Mapping[str, Logger] | None = None,
        folder: Path | None = None,
        checkpoint: CheckpointPlan | None = None,
        timeout_seconds: int = 1800,
    ) -> None:
        for callback in (callbacks or {}).values():
            check_hook_names(type(callback), base=Callback)
        self.engines = Engines(plugins, timeout_seconds=timeout_seconds)
        self.accelerator = self.engines.accelerator
        self.device = self.accelerator.device
        self.rank, self.world_size, self.is_main = distributed.rank(), distributed.world_size(), distributed.is_main()
        self.planned_steps, self.max_epochs, self.stop_at_step = max_steps, max_epochs, stop_at_step
        self.val_every, self.log_every, self.limit_val_batches = val_every, log_every, limit_val_batches
        self.gradient_accumulation_steps, self.seed = gradient_accumulation_steps, seed
        self.non_finite = NonFinitePolicy(action=non_finite, max_skipped=max_skipped)
        self.callbacks, self.loggers, self.folder = dict(callbacks or {}), dict(loggers or {}), folder
        self.checkpoint = checkpoint
        self.checkpoint_texts: dict[str, str] = {}  # small files that every checkpoint holds, such as config.yaml
        self.saver: Saver | None = None
        self.models: dict[str, ModelHandle] = {}
        self.global_step = 0
        self.is_filler = False  # whether the current micro-batch only keeps this rank in step and counts for nothing
        self.indices: Mapping[str, Sequence[int]] = {}  # which examples it holds, by the set's name; "": the shared
        self.logged: dict[str, Tensor] = {}  # by the task, of the current micro-batch
        self.loss_weight: Callable[[str], Tensor] = weigh_nothing  # within a training step: what a sum is multiplied by
        self.last_losses: dict[str, float] = {}  # "<model>/loss" of the last step that had one
        self._metrics: dict[str, float] = {}  # of the last validation
        self._validated_at: int | None = None
        self.stop_reason: str | None = None  # set by a callback, on all ranks alike, to end the run
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.reference: dict[str, float] = {}
        self.on_open: Callable[[], None] | None = None  # called once nothing can be refused any more
        self.fixed_weights: dict[str, str] = {}  # by model: the digest of those that are not trained
        self.data_identity: dict[str, dict[str, Any]] = {}  # by key: what tells a set of examples from another
        self._requests: signals.Requests | None = None  # of the user, by signals, while steps are made
        self._positions_before_extra: dict[str, dict[str, int]] | None = None

    # The run ---------------------------------------------------------------------------------------------------------

    def fit(
        self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData, resume: Checkpoint = None
    ) -> None:
        """Prepares the models, validates, trains, and validates again.

        Args:
            resume: A run folder or a checkpoint in it, of the same models, task, data and seed, to go on from.
        """
        check_task(task, models, stage="fit", accumulation=self.gradient_accumulation_steps)
        self.prepare(task, models=models, data=data)
        with self.stage("fit"):
            self._open(resume)
            self.emit("on_fit_start")
            if resume is None:
                self.before = self._validate()
            self._train()
            self.after = self._validate()
            _check_unchanged(self.frozen, self.fixed_weights)
            self.emit("on_fit_end")

    def validate(
        self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData, resume: Checkpoint = None
    ) -> dict[str, float]:
        """Prepares the models, with the weights of a checkpoint if one is given, and returns their metrics."""
        check_task(task, models, stage="validate", accumulation=self.gradient_accumulation_steps)
        self.prepare(task, models=models, data=data, trains=False)
        with self.stage("validate"):
            self._open(resume)
            self._validated_at = None
            self.after = self._validate()
        return self.after

    def _open(self, resume: Checkpoint) -> None:
        """Makes the run ready to be saved, and to go on from a checkpoint."""
        if self.checkpoint is not None:
            if self.folder is None:
                raise ConfigError("MultiModelTrainer(checkpoint=...) needs folder=..., where the checkpoints go")
            self.saver = Saver(self.checkpoint, self.folder)
            if resume is None:
                self.saver.check_folder()
        digests = {name: digest_fixed(model) for name, model in self.models.items()}
        self.fixed_weights = {name: digest for name, digest in digests.items() if digest is not None}
        if self.saver is not None or resume is not None:
            self.data_identity = identify_sources(self.sources)
        self._load(resume)
        if self.saver is not None:
            self.saver.check_state(self)
        if self.on_open is not None:
            self.on_open()

    def _load(self, resume: Checkpoint) -> None:
        if resume is None:
            return
        whole = resume if isinstance(resume, Whole) else choose(candidates(resume))
        with sign_of_life(f"loading {whole.path.name}"):
            give_back(self, whole.path)
        if self.saver is not None:
            self.saver.check_goal(self)
            self.saver.go_on_from(whole.path)
        log.info("resumed at step %d from %s", self.global_step, whole.path)

    def _train(self) -> None:
        self._set_training(True)
        self.emit("on_train_start")
        turns = self.rollouts.turns(self.global_step)
        with signals.deferred() as self._requests:
            self._validate_if_due()  # where the run that is resumed ended before it did
            while self.global_step < self.last_step and self.stop_reason is None:
                turn = next(turns)
                if turn.begins_epoch:
                    self.emit("on_train_epoch_start", epoch=turn.epoch)
                self._train_step(turn)
                if turn.ends_epoch:
                    self.emit("on_train_epoch_end", epoch=turn.epoch)
                self._heed_signals()
                self._validate_if_due()
                if self.saver is not None and self.saver.is_due(self):
                    self.saver.save(self)
            if self.saver is not None:
                self.saver.save(self, wait=True)
        self._requests = None
        self.emit("on_train_end")

    def _validate_if_due(self) -> None:
        if self.val_every and self.global_step % self.val_every == 0 and 0 < self.global_step < self.last_step:
            self._validate()

    def _heed_signals(self, *, between_steps: bool = True) -> None:
        if self._requests is not None:
            heed(self._requests, trainer=self, between_steps=between_steps)

    def _train_step(self, turn: Turn) -> None:
        step = self.global_step + 1
        seed_everything(self.seed, step, self.rank)
        for model in self.trained:
            model.enter_window(step)
        self.emit("on_train_step_start", step=step)
        reduced = Step(self, self.rollouts.window(turn)).run()
        self.global_step = step
        metrics = {f"train/{name}": value for name, value in reduced.items()}
        self.emit("on_train_step_end", metrics=metrics)
        self._positions_before_extra = None
        if self.is_log_step:
            if not self._is_regular_log_step:  # a run that goes on from here takes the line back
                self._positions_before_extra = self.log_positions()
            self.log_metrics(metrics, step=step)

    def _validate(self) -> dict[str, float]:
        if self.validation_loader is None or self._validated_at == self.global_step:
            return self._metrics
        self._set_training(False)
        self.emit("on_validation_start")
        metrics, self.reference = self.evaluate(on_batch=self._on_validation_batch)
        self.emit("on_validation_end", metrics=metrics)
        self.log_metrics(metrics, step=self.global_step)
        self._metrics, self._validated_at = metrics, self.global_step
        if self.saver is not None:
            self.saver.check_monitor(metrics)
            self.saver.note(self, metrics)
        self._set_training(True)
        return metrics

    def _on_validation_batch(self, **payload: Any) -> None:
        self.emit("on_validation_batch_end", **payload)
        self._heed_signals(between_steps=False)

    def evaluate(
        self, *, on_batch: Callable[..., None] | None = None, limit_batches: int | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the validation metrics, and those of the task's reference model; only `on_batch` hears of it.

        Leaves all models in evaluation mode.
        """
        self._set_training(False)
        return evaluate(self, on_batch=on_batch, limit_batches=limit_batches)

    def _set_training(self, mode: bool) -> None:
        for model in self.models.values():
            model.set_training(mode)

    # Preparation -----------------------------------------------------------------------------------------------------

    def prepare(
        self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData, trains: bool = True
    ) -> None:
        """Opens the data, gives every model its engine and the task its models."""
        check_hook_names(type(task), base=TaskModule)
        if self.folder is not None and self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.task, self.specs = task, dict(models)
        self.horizons = {name: horizon_keys(spec.scheduler) for name, spec in models.items()}
        self._open_data(data)
        run = RunFacts(
            batch_size=data.batch_size,
            accumulation=self.gradient_accumulation_steps,
            num_steps=self.max_steps,
            seed=self.seed,
            last_step=self.last_step,
            trains=trains and self.train_loader is not None,
        )
        _refuse(self.engines.check(models, run))
        built = self._build_models(models, run)
        self.models.update(built)
        found = [find_vocabulary_problem(name, model.module, self.tokenizers[name]) for name, model in built.items()]
        _refuse([problem for problems in found for problem in problems])
        if self.is_main:
            tell_lengths(self.models, self.specs, data, own_tokens=task.own_tokens)
        self.trained = [model for model in self.models.values() if model.trainable]
        self.frozen = [model for model in self.models.values() if not model.trainable]
        task.models, task.trainer = self.models, self
        self.hooks = HookCaller(self, task, self.callbacks)
        if self.is_main:
            show_plan(self, batch_size=data.batch_size, trains=trains)

    def _open_data(self, data: TrainingData) -> None:
        """Takes the shared examples and the models' own, and tells from them how long the run is."""
        task, specs = self.task, self.specs
        self.tokenizer = data.tokenizer
        self.tokenizers = {name: spec.tokenizer or (spec.data or data).tokenizer for name, spec in specs.items()}
        own = {name: spec.data for name, spec in specs.items() if spec.data is not None}
        task.own_data, self.sources = list(own), name_sources(data, own)
        problems = find_missing_fields(self.sources, task.batch_fields, task.check_batch)
        _refuse(problems + task.check_tokenizers(self.tokenizers))
        self.train_loader, self.validation_loader = self._loaders(self.sources)
        self.rollouts = Rollouts(self)
        self.max_steps = self._number_of_steps()
        self.last_step = min(self.max_steps, self.stop_at_step or self.max_steps)

    def _build_models(self, models: Mapping[str, ModelSpec], run: RunFacts) -> dict[str, ModelHandle]:
        built: dict[str, ModelHandle] = {}
        for name in build_order({name: spec.init_from for name, spec in models.items()}):
            spec = models[name]
            log.info("building %s", name)
            with sign_of_life(f"building {name}"):
                origin = built[spec.init_from] if spec.init_from is not None else None
                built[name] = self.engines.prepare(name, spec, run, origin=origin)
        return {name: built[name] for name in models}

    def _loaders(self, sources: Mapping[str, TrainingData]) -> tuple[TrainSources | None, ValidationSources | None]:
        ranks = {"rank": self.rank, "world_size": self.world_size}
        train = TrainSources(sources, accumulation=self.gradient_accumulation_steps, seed=self.seed, **ranks)
        validation = ValidationSources(sources, limit_batches=self.limit_val_batches, **ranks)
        return train if train.loaders else None, validation if validation.loaders else None

    def _number_of_steps(self) -> int:
        if self.train_loader is None:
            return 1
        by_epochs = self.max_epochs * self.train_loader.steps_per_epoch * self.task.passes if self.max_epochs else None
        limits = [steps for steps in (self.planned_steps, by_epochs) if steps is not None]
        if not limits:
            raise ConfigError("trainer.max_steps and trainer.max_epochs are both absent; give one of them")
        return min(limits)

    # For tasks and callbacks -----------------------------------------------------------------------------------------

    @property
    def is_log_step(self) -> bool:
        """Whether the step that just ended is logged."""
        is_end = self.global_step == self.last_step or self.stop_reason is not None
        return self._is_regular_log_step or is_end

    @property
    def _is_regular_log_step(self) -> bool:
        """Whether it would be logged wherever the run ended."""
        return self.global_step % self.log_every == 0 or self.global_step in (1, self.max_steps)

    def is_scored(self, name: str) -> bool:
        """Returns whether a model takes part in validations: its own data, or else the shared ones, have a set."""
        if self.validation_loader is None:
            return False
        return name in self.validation_loader.loaders or name not in self.task.own_data

    def metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the validation after a step, {} if the last one was another's."""
        return self._metrics if self._validated_at == step else {}

    def log(self, name: str, value: Tensor) -> None:
        """Adds a mean over the current micro-batch's items to the step's metrics."""
        self.logged[name] = value

    def enter_batch(self, *, is_filler: bool, indices: Mapping[str, Sequence[int]]) -> None:
        """Says that the task's next calls are about another micro-batch."""
        self.is_filler, self.indices = is_filler, indices
        self.logged.clear()

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hands numbers to all loggers."""
        for logger in self.loggers.values():
            logger.log_metrics(metrics, step=step)

    def log_table(self, name: str, *, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Hands a table of text to all loggers."""
        for logger in self.loggers.values():
            logger.log_table(name, columns=columns, rows=rows, step=step)

    def log_positions(self) -> dict[str, dict[str, int]]:
        """Returns how far each logger is, for a run that goes on from here."""
        if self._positions_before_extra is not None:
            return self._positions_before_extra
        return {name: dict(logger.position()) for name, logger in self.loggers.items()}

    def progress(self) -> dict[str, Any]:
        """Returns what a run that goes on from here must know besides its models."""
        return {
            "before": self.before,
            "reference": self.reference,
            "metrics": self._metrics,
            "validated_at": self._validated_at,
            "last_losses": self.last_losses,
        }

    def go_on(self, step: int, progress: Mapping[str, Any]) -> None:
        """Takes back what `progress` returned at the end of a step."""
        self.global_step = step
        self.before, self.reference = dict(progress["before"]), dict(progress["reference"])
        self._metrics, self._validated_at = dict(progress["metrics"]), progress["validated_at"]
        self.last_losses = dict(progress["last_losses"])

    def emit(self, hook: str, **payload: Any) -> None:
        """Calls a hook of the task and of all callbacks, under the plugin of the model concerned."""
        if not self.hooks.listeners[hook]:
            return
        name = payload.get("name")
        if name in self.engines.plugins:
            with self.engines.selected(name):
                self.hooks.emit(hook, **payload)
        else:
            self.hooks.emit(hook, **payload)

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Emits `setup` before what is done within it and `teardown` after it; `on_exception` where it fails."""
        try:
            self.emit("setup", stage=stage)
            yield
        except BaseException as error:
            for hook, payload in (("on_exception", {"exception": error}), ("teardown", {"stage": stage})):
                try:
                    self.emit(hook, **payload)
                except Exception as later:  # must not take the place of the cause
                    error.add_note(f"then {hook} failed: {later!r}")
            raise
        self.emit("teardown", stage=stage)

    def as_output(self, output: Tensor | StepOutput) -> StepOutput:
        """Returns what training_step returned, a bare loss as that of the only trained model."""
        if isinstance(output, StepOutput):
            return output
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise ValueError(f"training_step returned {kind}; return a loss, or StepOutput(losses={{name: loss}})")
        if len(self.trained) != 1:
            names = ", ".join(model.name for model in self.trained)
            raise ValueError(f"training_step returned one loss, but {names} are trained; return StepOutput(losses=...)")
        return StepOutput(losses={self.trained[0].name: output})


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def _check_unchanged(frozen: list[ModelHandle], before: Mapping[str, str]) -> None:
    for model in frozen:
        if digest_fixed(model) != before.get(model.name):
            raise RuntimeError(f"the weights of the frozen model '{model.name}' changed during the run")
