"""The mode that runs a teacher once over all examples and lets the task store what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.specs import ModelSpec, check_task

if TYPE_CHECKING:
    from trainer.data.sources import TrainingData
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer

MODE = "cache_teacher"


def cache_teacher(
    trainer: MultiModelTrainer, task: TaskModule, *, models: Mapping[str, ModelSpec], data: TrainingData
) -> None:
    """Prepares the models that the task needs for it, and calls its `cache_teacher` between setup and teardown.

    Args:
        models: Those that `task.models_for` names.
    """
    check_task(task, models, stage=MODE)
    trainer.prepare(task, models=models, data=data, trains=False)
    with trainer.stage(MODE):
        task.cache_teacher()
