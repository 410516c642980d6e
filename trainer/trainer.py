"""Fits one task over several models: it owns the order of things, the task owns the losses, callbacks the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import distributed
from trainer.callbacks.callback import Callback, HookCaller, check_hook_names
from trainer.config import ConfigError
from trainer.data.loader import MicroBatch
from trainer.data.sources import TrainingData, TrainSources, ValidationSources, find_missing_fields, name_sources
from trainer.data.tokenizers import find_vocabulary_problem
from trainer.engines import Engines, Plugin
from trainer.handle import ModelHandle
from trainer.heartbeat import sign_of_life
from trainer.loggers.logger import Logger
from trainer.plan import show_plan
from trainer.seeds import seed_everything
from trainer.specs import ModelSpec, RunFacts
from trainer.start_weights import build_order
from trainer.step import Step
from trainer.tally import Tally
from trainer.task import Batch, StepOutput, TaskModule, find_role_problems
from trainer.window import EVERY, Window, checked_counts, owner

log = logging.getLogger(__name__)

REFERENCE = "reference/"


class MultiModelTrainer:
    """Trains the models of a task, each under its own DeepSpeed plugin.

    After construction the first plugin is the active one; inside hooks it is that of the model concerned.

    Args:
        plugins: Role to a DeepSpeedPlugin, a DeepSpeed configuration, the path of its JSON, or {"replicate": True}.
        max_steps: Global steps (windows of micro-batches) of the run; schedules are laid out over them.
        stop_at_step: Ends the run there without shortening the schedules.
        val_every: Global steps between validations; None: only before the first and after the last.
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
        seed: int = 0,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Mapping[str, Logger] | None = None,
        folder: Path | None = None,
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
        self.callbacks, self.loggers, self.folder = dict(callbacks or {}), dict(loggers or {}), folder
        self.models: dict[str, ModelHandle] = {}
        self.global_step = 0
        self.is_filler = False  # whether the current micro-batch only keeps this rank in step and counts for nothing
        self.logged: dict[str, Tensor] = {}  # by the task, of the current micro-batch
        self.last_losses: dict[str, float] = {}  # "<model>/loss" of the last step that had one
        self._metrics: dict[str, float] = {}  # of the last validation
        self._validated_at: int | None = None
        self.stop_reason: str | None = None  # set by a callback, on all ranks alike, to end the run
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.reference: dict[str, float] = {}

    # The run ---------------------------------------------------------------------------------------------------------

    def fit(self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData) -> None:
        """Prepares the models, validates, trains, and validates again."""
        _check_task(task, models, stage="fit")
        self.prepare(task, models=models, data=data)
        with self._stage("fit"):
            fingerprints = {model.name: model.fingerprint() for model in self.frozen}
            self.emit("on_fit_start")
            self.before = self._validate()
            self._train()
            self.after = self._validate()
            _check_unchanged(self.frozen, fingerprints)
            self.emit("on_fit_end")

    def validate(self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData) -> dict[str, float]:
        """Prepares the models and returns their validation metrics."""
        _check_task(task, models, stage="validate")
        self.prepare(task, models=models, data=data, trains=False)
        with self._stage("validate"):
            self.after = self._validate()
        return self.after

    def _train(self) -> None:
        self._set_training(True)
        self.emit("on_train_start")
        assert self.train_loader is not None
        windows = self.train_loader.windows(self.global_step)
        while self.global_step < self.last_step and self.stop_reason is None:
            epoch, index, micro_batches = next(windows)
            if index == 0:
                self.emit("on_train_epoch_start", epoch=epoch)
            self._train_step(micro_batches)
            if index == self.train_loader.steps_per_epoch - 1:
                self.emit("on_train_epoch_end", epoch=epoch)
            if self.val_every and self.global_step % self.val_every == 0 and self.global_step < self.last_step:
                self._validate()
        self.emit("on_train_end")

    def _train_step(self, micro_batches: list[MicroBatch]) -> None:
        step = self.global_step + 1
        seed_everything(self.seed, step, self.rank)
        for model in self.trained:
            model.enter_window(step)
        self.emit("on_train_step_start", step=step)
        reduced = Step(self, self._window(micro_batches)).run()
        self.global_step = step
        metrics = {f"train/{name}": value for name, value in reduced.items()}
        self.emit("on_train_step_end", metrics=metrics)
        if self.is_log_step:
            self.log_metrics(metrics, step=step)

    def _window(self, micro_batches: list[MicroBatch]) -> Window:
        batches = []
        for micro in micro_batches:
            self.enter_batch(is_filler=micro.is_filler)
            with torch.no_grad():
                batches.append(self.task.prepare_batch(self._to_device(micro.batch)))
        return Window(self.task, batches, [micro.is_filler for micro in micro_batches], device=self.device)

    def _validate(self) -> dict[str, float]:
        if self.validation_loader is None or self._validated_at == self.global_step:
            return self._metrics
        self._set_training(False)
        self.emit("on_validation_start")
        metrics, self.reference = self.evaluate(on_batch=partial(self.emit, "on_validation_batch_end"))
        self.emit("on_validation_end", metrics=metrics)
        self.log_metrics(metrics, step=self.global_step)
        self._metrics, self._validated_at = metrics, self.global_step
        self._set_training(True)
        return metrics

    @torch.no_grad()
    def evaluate(
        self, *, on_batch: Callable[..., None] | None = None, limit_batches: int | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the validation metrics, and those of the task's reference model; only `on_batch` hears of it.

        Leaves all models in evaluation mode.
        """
        assert self.validation_loader is not None
        self._set_training(False)
        # Draws of a validation are the same before, after, and for a model that was exported and loaded again.
        seed_everything(self.seed, "validation", self.rank)
        tally = Tally(self.device)
        for index, micro in enumerate(islice(self.validation_loader, limit_batches)):
            batch = self._to_device(micro.batch)
            items = checked_counts(self.task.count_items(batch))
            self.enter_batch(is_filler=micro.is_filler)
            metrics = self.task.validation_step(batch, index)
            if not isinstance(metrics, dict):
                raise ValueError(f"validation_step returned {type(metrics).__name__}; return a dict of name to number")
            for name, value in {**metrics, **self.logged}.items():
                count = next((items[key] for key in (name, owner(name), EVERY) if key in items), 1)
                tally.add_metric(name, value, count, weight=0.0 if micro.is_filler_for(owner(name)) else 1.0)
            if on_batch is not None:
                on_batch(batch=batch, batch_idx=index)
        return self._split_metrics(tally.reduce())

    def _set_training(self, mode: bool) -> None:
        for model in self.models.values():
            model.set_training(mode)

    def _split_metrics(self, reduced: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        reference = {name.removeprefix(REFERENCE): reduced[name] for name in reduced if name.startswith(REFERENCE)}
        own = {name: value for name, value in reduced.items() if not name.startswith(REFERENCE)}
        return self._complete(own), self._complete(reference)

    def _complete(self, metrics: dict[str, float]) -> dict[str, float]:
        derived = self.task.derive_metrics(dict(metrics)) if metrics else {}
        return {f"val/{name}": value for name, value in {**metrics, **derived}.items()}

    # Preparation -----------------------------------------------------------------------------------------------------

    def prepare(
        self, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData, trains: bool = True
    ) -> None:
        """Gives every model its engine and the task its models."""
        check_hook_names(type(task), base=TaskModule)
        self.task, self.tokenizer = task, data.tokenizer
        self.tokenizers = {name: (spec.data or data).tokenizer for name, spec in models.items()}
        own = {name: spec.data for name, spec in models.items() if spec.data is not None}
        task.own_data, sources = list(own), name_sources(data, own)
        problems = find_missing_fields(sources, task.batch_fields)
        if problems:
            raise ConfigError(*problems)
        self.train_loader, self.validation_loader = self._loaders(sources)
        self.max_steps = self._number_of_steps()
        self.last_step = min(self.max_steps, self.stop_at_step or self.max_steps)
        run = RunFacts(
            batch_size=data.batch_size,
            accumulation=self.gradient_accumulation_steps,
            num_steps=self.max_steps,
            seed=self.seed,
            trains=trains and self.train_loader is not None,
        )
        problems = self.engines.check(models, run)
        if problems:
            raise ConfigError(*problems)
        self.models.update(self._build_models(models, run))
        problems = [
            problem
            for name, model in self.models.items()
            for problem in find_vocabulary_problem(name, model.module, self.tokenizers[name])
        ]
        if problems:
            raise ConfigError(*problems)
        self.trained = [model for model in self.models.values() if model.trainable]
        self.frozen = [model for model in self.models.values() if not model.trainable]
        task.models, task.trainer = self.models, self
        self.hooks = HookCaller(self, task, self.callbacks)
        if self.is_main:
            show_plan(self, batch_size=data.batch_size)

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
        by_epochs = self.max_epochs * self.train_loader.steps_per_epoch if self.max_epochs else None
        limits = [steps for steps in (self.planned_steps, by_epochs) if steps is not None]
        if not limits:
            raise ConfigError("trainer.max_steps and trainer.max_epochs are both absent; give one of them")
        return min(limits)

    # For tasks and callbacks -----------------------------------------------------------------------------------------

    @property
    def is_log_step(self) -> bool:
        """Whether the step that just ended is logged."""
        is_edge = self.global_step in (1, self.last_step) or self.stop_reason is not None
        return self.global_step % self.log_every == 0 or is_edge

    def is_scored(self, name: str) -> bool:
        """Returns whether a model takes part in validations: its own data, or else the shared ones, have a set."""
        if self.validation_loader is None:
            return False
        return name in self.validation_loader.loaders or name not in self.task.own_data

    def log(self, name: str, value: Tensor) -> None:
        """Adds a mean over the current micro-batch's items to the step's metrics."""
        self.logged[name] = value

    def enter_batch(self, *, is_filler: bool) -> None:
        """Says that the task's next calls are about another micro-batch."""
        self.is_filler = is_filler
        self.logged.clear()

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hands numbers to all loggers."""
        for logger in self.loggers.values():
            logger.log_metrics(metrics, step=step)

    def log_table(self, name: str, *, columns: list[str], rows: list[list[str]], step: int) -> None:
        """Hands a table of text to all loggers."""
        for logger in self.loggers.values():
            logger.log_table(name, columns=columns, rows=rows, step=step)

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
    def _stage(self, stage: str) -> Iterator[None]:
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

    def _to_device(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise ValueError(f"a batch is of type {type(batch).__name__}; datasets' items and collate must give dicts")
        return {name: self._moved(value) for name, value in batch.items()}

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Mapping):  # a model's own examples
            return self._to_device(dict(value))
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

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


def _check_task(task: TaskModule, models: Mapping[str, ModelSpec], *, stage: str) -> None:
    check_hook_names(type(task), base=TaskModule)
    trainable = {name: spec.trainable for name, spec in models.items()}
    own_data = [name for name, spec in models.items() if spec.data is not None]
    problems = find_role_problems(task, trainable=trainable, own_data=own_data, stage=stage)
    if problems:
        raise ConfigError(*problems)


def _check_unchanged(frozen: list[ModelHandle], before: Mapping[str, list[int]]) -> None:
    for model in frozen:
        if model.fingerprint() != before[model.name]:
            raise RuntimeError(f"the weights of the frozen model '{model.name}' changed during the run")
