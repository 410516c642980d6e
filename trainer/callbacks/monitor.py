"""Adds each trained model's learning rate and gradient norm to the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer


class ModelMonitor(Callback):
    """Logs `train/<model>/lr` and `train/<model>/grad_norm`, the norm over all ranks before clipping."""

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        if not trainer.is_log_step:
            return
        for name, handle in trainer.models.items():
            if not handle.trainable:
                continue
            for key, value in {"lr": handle.learning_rate(), "grad_norm": handle.grad_norm()}.items():
                if value is not None:
                    metrics[f"train/{name}/{key}"] = value
