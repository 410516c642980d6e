"""Ends a run that has stopped getting better."""

from __future__ import annotations

import difflib
import logging
import math
from typing import TYPE_CHECKING, Any

from trainer.callbacks.callback import Callback
from trainer.config import ConfigError

if TYPE_CHECKING:
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Stops when a validation metric has not improved for `patience` validations, or is NaN.

    Args:
        monitor: Full name of the metric, such as val/cross_entropy.
        mode: "min" or "max": which way is better.
        min_delta: What a change must exceed to be an improvement.
    """

    order = 80  # after those who add to the validation's metrics

    def __init__(self, *, monitor: str, mode: str = "min", patience: int = 3, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"callbacks.early_stopping.mode={mode} is neither min nor max")
        if patience < 1:
            raise ConfigError(f"callbacks.early_stopping.patience={patience} must be at least 1")
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"callbacks.early_stopping.min_delta={min_delta}: must be a finite number of at least 0")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self.best: float | None = None
        self.num_bad = 0

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        if trainer.val_every is None:
            raise ConfigError(
                "trainer.val_every=null: callbacks.early_stopping stops a run after a validation while it trains; give "
                "the steps from one to the next"
            )

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        if self.monitor not in metrics:
            raise ConfigError(self._unknown(metrics))
        value = metrics[self.monitor]
        self._take(value)
        if trainer.global_step >= trainer.last_step:
            return
        if math.isnan(value):
            trainer.stop_reason = f"{self.monitor} is NaN at step {trainer.global_step}"
        elif self.num_bad >= self.patience:
            trainer.stop_reason = (
                f"{self.monitor} has not improved on {self.best:.6g} for {self.num_bad} validations (now {value:.6g})"
            )

    def _take(self, value: float) -> None:
        if self._is_better(value):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _unknown(self, metrics: dict[str, float]) -> str:
        near = difflib.get_close_matches(self.monitor, metrics, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(metrics))}"
        return f"callbacks.early_stopping.monitor={self.monitor} is no metric of the validation; {hint}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad, "of": [self.monitor, self.mode]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["of"] == [self.monitor, self.mode]:
            self.best, self.num_bad = state["best"], state["num_bad"]
        else:
            log.warning("callbacks.early_stopping watched %s (%s) before: it begins anew", *state["of"])
