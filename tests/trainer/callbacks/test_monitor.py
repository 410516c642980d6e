from types import SimpleNamespace
from typing import Any

from trainer.callbacks import ModelMonitor


def handle(*, trainable: bool, lr: float | None = None, norm: float | None = None) -> Any:
    return SimpleNamespace(trainable=trainable, learning_rate=lambda: lr, grad_norm=lambda: norm)


def test_each_trained_model_gets_its_rate_and_norm() -> None:
    models = {"student": handle(trainable=True, lr=1e-3, norm=2.5), "teacher": handle(trainable=False)}
    trainer: Any = SimpleNamespace(is_log_step=True, models=models)
    metrics = {"train/loss": 1.0}

    ModelMonitor().on_train_step_end(trainer, None, metrics)

    assert metrics == {"train/loss": 1.0, "train/student/lr": 1e-3, "train/student/grad_norm": 2.5}


def test_nothing_is_added_between_log_steps_or_for_a_norm_that_is_unknown() -> None:
    trainer: Any = SimpleNamespace(is_log_step=False, models={"student": handle(trainable=True, lr=1e-3)})
    metrics: dict[str, float] = {}

    ModelMonitor().on_train_step_end(trainer, None, metrics)
    assert metrics == {}

    trainer.is_log_step = True
    ModelMonitor().on_train_step_end(trainer, None, metrics)
    assert metrics == {"train/student/lr": 1e-3}
