"""A task of three small models, and its data, for runs that are killed, refused and gone on with."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer import StepOutput, TaskModule

SIZE = 16


def net(hidden: int) -> nn.Module:
    """Returns a network that drops some of what it sees, so that random states matter."""
    return nn.Sequential(nn.Linear(SIZE, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, SIZE))


class Points(Dataset[dict[str, Tensor]]):
    """Points that follow from their number."""

    def __init__(self, num_points: int) -> None:
        self.num_points = num_points

    def __len__(self) -> int:
        return self.num_points

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(SIZE, generator=generator)}


class Trio(TaskModule):
    """Both learn from the teacher and from each other.

    Args:
        step_seconds: What a micro-batch takes longer than it must.
        hang_at: The step in which rank 1 waits forever.
        nan_at: The step in which rank 1's loss of the first model is not a number.
    """

    def __init__(self, *, step_seconds: float = 0.0, hang_at: int | None = None, nan_at: int | None = None) -> None:
        self.step_seconds, self.hang_at, self.nan_at = step_seconds, hang_at, nan_at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        time.sleep(self.step_seconds)
        step, is_second_rank = self.trainer.global_step + 1, os.environ["RANK"] == "1"
        if self.hang_at == step and is_second_rank:
            time.sleep(10_000)
        losses = self._losses(batch["x"])
        if self.nan_at == step and is_second_rank:
            losses["first"] = losses["first"] * float("nan")
        return StepOutput(losses=losses)

    def _losses(self, x: Tensor) -> dict[str, Tensor]:
        target = self.models["teacher"](x)
        first, second = self.models["first"](x), self.models["second"](x)
        return {
            "first": (first - target).pow(2).mean() + (first - second.detach()).pow(2).mean(),
            "second": (second - target).pow(2).mean() + (second - first.detach()).pow(2).mean(),
        }

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        time.sleep(self.step_seconds)
        return {f"{name}/loss": loss for name, loss in self._losses(batch["x"]).items()}
