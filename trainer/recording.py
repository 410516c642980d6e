"""The mode that runs a teacher once over all examples and lets the task store what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.config import ConfigError
from trainer.task import TaskModule, find_task_problems

if TYPE_CHECKING:
    from trainer.data.sources import TrainingData
    from trainer.specs import ModelSpec
    from trainer.trainer import MultiModelTrainer

MODE = "cache_teacher"


def cache_teacher(
    trainer: MultiModelTrainer, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData
) -> None:
    """Prepares the models that the task needs for it, and calls its `cache_teacher` between setup and teardown.

    Args:
        models: Those that `task.models_for` names.
    """
    problems = find_task_problems(
        task,
        trainable={name: spec.trainable for name, spec in models.items()},
        own_data=[name for name, spec in models.items() if spec.data is not None],
        stage=MODE,
        adapted=[name for name, spec in models.items() if spec.lora],
    )
    if problems:
        raise ConfigError(*problems)
    trainer.prepare(task, models=models, data=data, trains=False)
    with trainer.stage(MODE):
        task.cache_teacher()
