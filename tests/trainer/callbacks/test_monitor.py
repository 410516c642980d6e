from types import SimpleNamespace
from typing import Any

import torch

from trainer.callbacks import ModelMonitor


def handle(
    *,
    lr: float | None = None,
    norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
) -> Any:
    return SimpleNamespace(
        name="student",
        learning_rate=lambda: lr,
        grad_norm=lambda: norm,
        num_updates=3,
        num_skipped=0 if dtype == torch.float32 else 1,
        dtype=dtype,
        loss_scale=lambda: scale,
    )


def metrics_of(model: Any, *, is_log_step: bool = True) -> dict[str, float]:
    trainer: Any = SimpleNamespace(is_log_step=is_log_step, trained=[model])
    metrics: dict[str, float] = {}
    ModelMonitor().on_train_step_end(trainer, None, metrics)
    return {name.removeprefix("train/student/"): value for name, value in metrics.items()}


def test_each_trained_model_gets_its_rate_norm_and_count_of_updates() -> None:
    assert metrics_of(handle(lr=1e-3, norm=2.5)) == {"lr": 1e-3, "grad_norm": 2.5, "updates": 3.0}


def test_nothing_is_added_between_log_steps_or_for_what_is_not_known_yet() -> None:
    assert metrics_of(handle(lr=1e-3), is_log_step=False) == {}
    assert metrics_of(handle()) == {"updates": 3.0}


def test_types_that_can_overflow_show_their_skipped_updates_and_loss_scale() -> None:
    assert metrics_of(handle(dtype=torch.bfloat16)) == {"updates": 3.0, "skipped_updates": 1.0}
    shown = metrics_of(handle(dtype=torch.float16, scale=1024.0))
    assert shown == {"updates": 3.0, "skipped_updates": 1.0, "loss_scale": 1024.0}
