"""Moves a micro-batch to where the models are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.task import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns a micro-batch with its tensors, also those of models' own examples, on a device."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is of type {type(batch).__name__}; datasets' items and collate must give dicts")
    return {name: _moved(value, device) for name, value in batch.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):  # a model's own examples
        return to_device(dict(value), device)
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
