"""Trains several models together, each under its own DeepSpeed plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.callbacks.callback import Callback
    from trainer.config import ConfigError
    from trainer.data.collate import model_inputs
    from trainer.data.sources import TrainingData
    from trainer.distributed import gather_with_gradient
    from trainer.handle import ModelHandle
    from trainer.saving.checkpoints import CheckpointPlan
    from trainer.specs import ModelSpec
    from trainer.task import IGNORED, Batch, Metric, NonFiniteError, StepOutput, TaskModule
    from trainer.trainer import MultiModelTrainer
    from trainer.updates import UpdatePlan

__version__ = "0.1.0"

__all__ = [
    "IGNORED",
    "Batch",
    "Callback",
    "CheckpointPlan",
    "ConfigError",
    "Metric",
    "ModelHandle",
    "ModelSpec",
    "MultiModelTrainer",
    "NonFiniteError",
    "StepOutput",
    "TaskModule",
    "TrainingData",
    "UpdatePlan",
    "gather_with_gradient",
    "model_inputs",
]

# Lazily (PEP 562): `python -m trainer --help` must not import torch.
_HOMES = {
    "Callback": "trainer.callbacks.callback",
    "CheckpointPlan": "trainer.saving.checkpoints",
    "ConfigError": "trainer.config",
    "ModelSpec": "trainer.specs",
    "gather_with_gradient": "trainer.distributed",
    "ModelHandle": "trainer.handle",
    "MultiModelTrainer": "trainer.trainer",
    "TrainingData": "trainer.data.sources",
    "UpdatePlan": "trainer.updates",
    "model_inputs": "trainer.data.collate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "trainer.task")), name)
