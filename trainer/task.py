"""What a task is: which models it needs and how their outputs combine into losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.kinds import find_kind_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.handle import ModelHandle
    from trainer.trainer import MultiModelTrainer

Batch = dict[str, Any]
Metric = Tensor | float | tuple[Tensor | float, Tensor | float]

IGNORED = -100  # the label that does not count, as in torch and transformers
JOINT = "joint"  # the key of one loss through every trained model that it depends on


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite, and training on makes no sense."""


@dataclass(kw_only=True)
class StepOutput:
    """Losses and metrics of one micro-batch.

    Args:
        losses: Name of a trained model (or "joint") to its loss, a mean over the micro-batch's items, ().
        sums: The same where the sum over the items is at hand; a name stands in one of the three.
        shares: The same where it carries its weight in the global batch already, by `trainer.loss_weight`: for terms of
            several counts whose gradient is computed together.
        metrics: Name to a mean over the items, () , or to (sum, count). "student/forward_kl" is logged as
            train/student/forward_kl.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


class TaskModule:
    """Base of all tasks; every `on_...` hook of a callback may be defined here too, without `trainer` and `task`."""

    models: Mapping[str, ModelHandle] = MappingProxyType({})  # given by the trainer, there from `setup` on
    trainer: MultiModelTrainer
    reference: str | None = None  # the model whose metrics stand beside the trained one's, such as "teacher"
    own_data: Sequence[str] = ()  # the models with examples of their own; given by the trainer
    reads_one_batch: bool = False  # whether all models must read the same examples, so that none may have its own
    reads_packed: bool = True  # whether a row may hold several documents
    one_loss: Sequence[str] = ()  # the models that a joint loss trains, and which step together therefore
    may_differ: Sequence[str] = ()  # its keys that a resumed run may change: where things are, not what is learned
    own_tokens: Sequence[str] = ()  # the models that may read other token ids than the data's: the task translates
    reads: Mapping[str, str] = MappingProxyType({})  # by model: what it must give, one of `trainer.kinds`
    batch_fields: tuple[str, ...] = ()  # what every batch must hold, checked before a model is built
    metric_labels: Mapping[str, str] = MappingProxyType({})  # metric to its words in the closing table
    # Last part of a metric to "min" or "max": of these the share of the gap to the reference that was closed is told.
    gap_metrics: Mapping[str, str] = MappingProxyType({})
    passes: int = 1  # global steps that train on each window, which is prepared once: inner epochs over a rollout
    modes: tuple[str, ...] = ("fit", "validate", "export")  # what the task can be run for; those that need no method
    reference_name: str | None = None  # what the reference was built from, where it is none of the run's models

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        """Returns which of the configured models a mode needs; the others are not built."""
        return list(names)

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        """Returns what is wrong with the run's models for this task, before any of them is built.

        Args:
            trainable: Name of each model to whether it is trained.
            stage: "fit", "validate", "export" or "cache_teacher".
        """
        return []

    def check_adapters(self, adapted: Sequence[str]) -> list[str]:
        """Returns what is wrong with which models carry LoRA adapters, before any of them is built.

        Args:
            adapted: Their names.
        """
        return []

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        """Returns what is wrong with the tokenizers that the models read by, before any of them is built.

        Args:
            tokenizers: By model: its own for those of `own_tokens` that bring one, else that of its examples.
        """
        return []

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        """Returns what is wrong with a batch of a set's first example, before any model is built.

        Args:
            key: The set's, such as data.train.
        """
        return []

    def setup(self, stage: str) -> None:
        """Runs once all models are prepared; stage is "fit", "validate" or "cache_teacher"."""

    def cache_teacher(self) -> None:
        """Stores what a teacher says of all examples: mode=cache_teacher, of a task that has it among its modes."""
        raise NotImplementedError(f"{type(self).__name__} must define cache_teacher(self)")

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the micro-batch to train on; runs without gradient, before items are counted."""
        return batch

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        """Returns the prepared micro-batches of a window, as many; runs after `prepare_batch` on all of them.

        For what needs all of a window, such as advantages that are whitened over it; every rank calls it, with as many
        micro-batches.

        Args:
            is_filler: Which of them only keep this rank in step and count for nothing.
        """
        return batches

    def count_items(self, batch: Batch) -> int | Tensor | dict[str, int | Tensor]:
        """Returns what the loss is a mean of, for all losses or by loss name.

        By default the labels that count (not -100, after the shift), else the examples; where models have data of their
        own, by model.
        """
        if not self.own_data:
            return _count(batch)
        return {name: _count(self.batch_of(name, batch)) for name in self.models if self.batch_of(name, batch)}

    def batch_of(self, name: str, batch: Batch) -> Batch:
        """Returns a model's part of a batch: its own examples where it has data of its own, else the shared ones.

        {} where there are none, as in a validation of a model whose own data have no validation set.
        """
        if name in self.own_data:
            return dict(batch.get(name, {}))
        return {key: value for key, value in batch.items() if key not in self.own_data}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | StepOutput:
        """Returns the losses of one micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} must define training_step(self, batch, batch_idx)")

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        """Returns metrics of one micro-batch, each a mean over its items or (sum, count).

        A name that starts with "reference/" is a metric of the reference model. One whose last part begins with "_"
        reaches only `derive_metrics`, and one without an item on any rank nobody.
        """
        raise NotImplementedError(f"{type(self).__name__} must define validation_step(self, batch, batch_idx)")

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns metrics that follow from the reduced ones, such as a perplexity.

        Called once with the trained model's and once with the reference model's, both without `reference/`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what must survive a restart besides the models, such as a coefficient that adapts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned; after `setup`."""

    def log(self, name: str, value: Tensor | float) -> None:
        """Adds a mean over this micro-batch's items to the metrics: `train/<name>`, or `val/<name>` in a validation."""
        self.trainer.log(name, torch.as_tensor(value).detach())


def find_task_problems(
    task: TaskModule,
    *,
    trainable: Mapping[str, bool],
    own_data: Sequence[str],
    stage: str,
    adapted: Sequence[str] = (),
    accumulation: Mapping[str, int] = MappingProxyType({}),
    targets: Mapping[str, str] = MappingProxyType({}),
    packed: Sequence[str] = (),
) -> list[str]:
    """Returns what is wrong with the run's models and their data for a task, before any of them is built.

    Args:
        accumulation: Name of each model to its micro-batches per update, where it is trained.
        targets: Name of each model to the `_target_` of its build, where that is known.
        packed: The keys of the sets whose rows hold several documents.
    """
    if stage not in task.modes:
        hint = "choose one of them, or a task that has it, such as task=distill"
        return [f"mode={stage}: {type(task).__name__} has no such mode, only {', '.join(task.modes)}; {hint}"]
    problems = [*task.check_models(trainable, stage=stage), *task.check_adapters(adapted)]
    needed = set(task.models_for(stage, list(trainable)))
    problems += find_kind_problems({name: kind for name, kind in task.reads.items() if name in needed}, targets)
    if task.reads_one_batch:
        problems += [
            f"models.{name}.data: the models of {type(task).__name__} read the same examples; drop it, and set `data`"
            for name in own_data
        ]
    if not task.reads_packed:
        problems += [
            f"{key}.packing=true: {type(task).__name__} needs rows of one example each; set {key}.packing=false"
            for key in packed
        ]
    paces = {name: accumulation[name] for name in task.one_loss if name in accumulation}
    if stage == "fit" and len(set(paces.values())) > 1:
        told = " and ".join(f"models.{name}.gradient_accumulation_steps={pace}" for name, pace in paces.items())
        problems.append(f"{told}: one loss of {type(task).__name__} trains them, so they step together; set them alike")
    return problems


def _count(batch: Batch) -> int | Tensor:
    if "labels" in batch:
        labels: Tensor = batch["labels"]
        return (labels[:, 1:] != IGNORED).sum()
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim > 0)
