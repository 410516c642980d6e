"""Runs on several ranks that pass over each window several times."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.test_trainer import reset_accelerate
from trainer import CheckpointPlan, ModelSpec, MultiModelTrainer, TaskModule, TrainingData, distributed

STEPS = 8


class Drawn(TaskModule):
    """Learns targets that are drawn once per window, around what the model says at that time."""

    passes = 3

    def __init__(self) -> None:
        self.prepared: list[int] = []  # the step of each preparation
        self.epochs: list[tuple[str, int]] = []

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        self.prepared.append(self.trainer.global_step + 1)
        said = self.models["model"](batch["x"])
        return {**batch, "target": said + torch.randn_like(said), "rows": self.trainer.indices[""]}

    def prepare_window(self, batches: list[dict[str, Any]], *, is_filler: Sequence[bool]) -> list[dict[str, Any]]:
        level = torch.stack([batch["target"].mean() for batch in batches]).mean()
        return [{**batch, "target": batch["target"] - level, "is_filler": is_filler[0]} for batch in batches]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert len(batch["rows"]) == len(batch["x"])
        loss: Tensor = (self.models["model"](batch["x"]) - batch["target"]).pow(2).mean()
        return loss

    def on_train_epoch_start(self, epoch: int) -> None:
        self.epochs.append(("start", epoch))

    def on_train_epoch_end(self, epoch: int) -> None:
        self.epochs.append(("end", epoch))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def run(folder: Path | None = None, *, stop_at_step: int | None = None, resume: Path | None = None) -> dict[str, Any]:
    """Returns the weights after a run, or the part of one, and when its windows were prepared.

    An epoch has 16 examples, 8 in each window: steps 1 to 6, and 7 to 12 of which 2 are made.
    """
    reset_accelerate()
    generator = torch.Generator().manual_seed(0)
    rows: Any = [{"x": row} for row in torch.randn(16, 4, generator=generator)]
    data = TrainingData(train=rows, batch_size=4 // distributed.world_size())
    task = Drawn()
    trainer = MultiModelTrainer(
        {"model": {"zero_optimization": {"stage": 2}}},
        max_steps=STEPS,
        stop_at_step=stop_at_step,
        gradient_accumulation_steps=2,
        folder=folder,
        checkpoint=CheckpointPlan() if folder is not None else None,
    )
    spec = ModelSpec(build=net, dtype=torch.float32, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    trainer.fit(task, models={"model": spec}, data=data, resume=resume)
    weights = [parameter.detach().clone() for parameter in trainer.models["model"].module.parameters()]
    return {"weights": weights, "prepared": sorted(set(task.prepared)), "epochs": task.epochs}


def run_in_parts(folder: Path) -> dict[str, Any]:
    """Returns an undisturbed run, and one that was ended between two passes over a window."""
    whole = run()
    run(folder, stop_at_step=5)
    if distributed.is_main():
        shutil.copytree(folder, folder.with_name("ended"))
    distributed.barrier()
    return {"whole": whole, "rest": run(folder, resume=folder)}


def go_on(folder: Path) -> dict[str, Any]:
    """Returns the rest of a run that another number of ranks began."""
    return run(folder, resume=folder)
