"""Adds each trained model's updates, learning rate and gradient norm to the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer


def is_half(model: ModelHandle) -> bool:
    """Returns whether a model's type is one whose gradients overflow in ordinary runs."""
    return model.dtype in (torch.float16, torch.bfloat16)


class ModelMonitor(Callback):
    """Logs what each trained model's optimizer does.

    `train/<model>/updates` counts its own updates; `lr` and `grad_norm` (over all ranks, before clipping) are those of
    the last one, and absent before it. `skipped_updates` counts those that the engine left out because a gradient was
    not finite, of a float32 model only where there were any; `loss_scale` is that of a float16 model.
    """

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        if not trainer.is_log_step:
            return
        for model in trainer.trained:
            values = {
                "lr": model.learning_rate(),
                "grad_norm": model.grad_norm(),
                "updates": float(model.num_updates),
                "skipped_updates": float(model.num_skipped) if model.num_skipped or is_half(model) else None,
                "loss_scale": model.loss_scale(),
            }
            metrics.update({f"train/{model.name}/{key}": value for key, value in values.items() if value is not None})
