"""Trains several models together, each under its own DeepSpeed plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.callbacks.callback import Callback
    from trainer.config import ConfigError
    from trainer.data.collate import model_inputs
    from trainer.data.identity import identify_sources
    from trainer.data.sources import TrainingData
    from trainer.distributed import gather, gather_with_gradient, sum_over_ranks
    from trainer.handle import ModelHandle
    from trainer.preflight import (
        Finding,
        GradientCheck,
        find_rank_differences,
        kept_random_state,
        rank_facts,
        run_checks,
        sample_windows,
    )
    from trainer.saving.checkpoints import CheckpointPlan
    from trainer.saving.digests import digest_fixed
    from trainer.specs import ModelSpec
    from trainer.task import IGNORED, Batch, Metric, NonFiniteError, StepOutput, TaskModule
    from trainer.trainer import MultiModelTrainer
    from trainer.updates import UpdatePlan
    from trainer.words import did_you_mean

__version__ = "0.1.0"

__all__ = [
    "IGNORED",
    "Batch",
    "Callback",
    "CheckpointPlan",
    "ConfigError",
    "Finding",
    "GradientCheck",
    "Metric",
    "ModelHandle",
    "ModelSpec",
    "MultiModelTrainer",
    "NonFiniteError",
    "StepOutput",
    "TaskModule",
    "TrainingData",
    "UpdatePlan",
    "did_you_mean",
    "digest_fixed",
    "find_rank_differences",
    "gather",
    "gather_with_gradient",
    "identify_sources",
    "kept_random_state",
    "model_inputs",
    "rank_facts",
    "run_checks",
    "sample_windows",
    "sum_over_ranks",
]

# Lazily (PEP 562): `python -m trainer --help` must not import torch.
_HOMES = {
    "Callback": "trainer.callbacks.callback",
    "CheckpointPlan": "trainer.saving.checkpoints",
    "ConfigError": "trainer.config",
    "ModelSpec": "trainer.specs",
    "digest_fixed": "trainer.saving.digests",
    "gather": "trainer.distributed",
    "gather_with_gradient": "trainer.distributed",
    "identify_sources": "trainer.data.identity",
    "sum_over_ranks": "trainer.distributed",
    "Finding": "trainer.preflight",
    "GradientCheck": "trainer.preflight",
    "find_rank_differences": "trainer.preflight",
    "kept_random_state": "trainer.preflight",
    "rank_facts": "trainer.preflight",
    "run_checks": "trainer.preflight",
    "sample_windows": "trainer.preflight",
    "ModelHandle": "trainer.handle",
    "MultiModelTrainer": "trainer.trainer",
    "TrainingData": "trainer.data.sources",
    "UpdatePlan": "trainer.updates",
    "did_you_mean": "trainer.words",
    "model_inputs": "trainer.data.collate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "trainer.task")), name)
