"""Trains several models together, each under its own DeepSpeed plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.adapters import is_adapted
    from trainer.callbacks.callback import Callback
    from trainer.config import ConfigError
    from trainer.data.collate import model_inputs
    from trainer.data.device import to_device
    from trainer.data.identity import identify_sources
    from trainer.data.sources import TrainingData
    from trainer.data.tokenizers import end_tokens
    from trainer.distributed import gather, gather_with_gradient, is_main, sum_over_ranks
    from trainer.export import export_model
    from trainer.handle import ModelHandle
    from trainer.kinds import LOGITS, SCORE, VALUES
    from trainer.preflight import (
        Finding,
        GradientCheck,
        find_rank_differences,
        kept_random_state,
        rank_facts,
        refuse_together,
        run_checks,
        sample_windows,
    )
    from trainer.saving.checkpoints import CheckpointPlan
    from trainer.saving.digests import digest_fixed, digest_weights
    from trainer.specs import ModelSpec
    from trainer.targets import TargetError, find_target
    from trainer.task import IGNORED, Batch, Metric, NonFiniteError, StepOutput, TaskModule
    from trainer.trainer import MultiModelTrainer
    from trainer.updates import UpdatePlan
    from trainer.words import did_you_mean

__version__ = "0.1.0"

__all__ = [
    "IGNORED",
    "LOGITS",
    "SCORE",
    "VALUES",
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
    "TargetError",
    "TaskModule",
    "TrainingData",
    "UpdatePlan",
    "did_you_mean",
    "digest_fixed",
    "digest_weights",
    "end_tokens",
    "export_model",
    "find_rank_differences",
    "find_target",
    "gather",
    "gather_with_gradient",
    "identify_sources",
    "is_adapted",
    "is_main",
    "kept_random_state",
    "model_inputs",
    "rank_facts",
    "refuse_together",
    "run_checks",
    "sample_windows",
    "sum_over_ranks",
    "to_device",
]

# Lazily (PEP 562): `python -m trainer --help` must not import torch.
_HOMES = {
    "LOGITS": "trainer.kinds",
    "SCORE": "trainer.kinds",
    "VALUES": "trainer.kinds",
    "Callback": "trainer.callbacks.callback",
    "CheckpointPlan": "trainer.saving.checkpoints",
    "ConfigError": "trainer.config",
    "ModelSpec": "trainer.specs",
    "TargetError": "trainer.targets",
    "digest_fixed": "trainer.saving.digests",
    "find_target": "trainer.targets",
    "digest_weights": "trainer.saving.digests",
    "gather": "trainer.distributed",
    "gather_with_gradient": "trainer.distributed",
    "identify_sources": "trainer.data.identity",
    "is_adapted": "trainer.adapters",
    "sum_over_ranks": "trainer.distributed",
    "Finding": "trainer.preflight",
    "GradientCheck": "trainer.preflight",
    "find_rank_differences": "trainer.preflight",
    "kept_random_state": "trainer.preflight",
    "rank_facts": "trainer.preflight",
    "refuse_together": "trainer.preflight",
    "run_checks": "trainer.preflight",
    "sample_windows": "trainer.preflight",
    "ModelHandle": "trainer.handle",
    "MultiModelTrainer": "trainer.trainer",
    "TrainingData": "trainer.data.sources",
    "UpdatePlan": "trainer.updates",
    "did_you_mean": "trainer.words",
    "end_tokens": "trainer.data.tokenizers",
    "export_model": "trainer.export",
    "is_main": "trainer.distributed",
    "model_inputs": "trainer.data.collate",
    "to_device": "trainer.data.device",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "trainer.task")), name)
