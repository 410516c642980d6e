"""Ends a run whose gradients are no numbers any more."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from trainer.callbacks.callback import Callback
from trainer.task import NonFiniteError

if TYPE_CHECKING:
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


class NonFiniteGuard(Callback):
    """Watches every update; the trainer itself refuses a non-finite loss.

    An update that the engine skipped, because its gradients are not finite, is reported; more than `max_skipped` of one
    model in a row end the run. One that was applied all the same has destroyed the weights and ends it at once.
    Gradient norm and skipping are global numbers, equal on all ranks, so that all ranks decide alike.
    """

    def __init__(self, *, max_skipped: int = 10) -> None:
        self.max_skipped = max_skipped
        self.skipped: dict[str, int] = {}  # by model: its skipped updates in a row

    def on_after_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        handle, step = trainer.models[name], trainer.global_step + 1
        norm = handle.grad_norm()
        if handle.was_update_applied():
            if norm is not None and not math.isfinite(norm):
                raise NonFiniteError(_destroyed(name, step, norm))
            self.skipped[name] = 0
            return
        self.skipped[name] = self.skipped.get(name, 0) + 1
        if self.skipped[name] > self.max_skipped:
            raise NonFiniteError(_stuck(name, step, self.skipped[name]))
        log.warning(
            "step %d: the update of %s was skipped: its gradients are not finite (%d in a row, the run ends after %d)",
            step,
            name,
            self.skipped[name],
            self.max_skipped,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": dict(self.skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = dict(state["skipped"])


def _advice(name: str) -> str:
    return (
        f"lower models.{name}.optimizer.lr, set models.{name}.max_grad_norm=1.0 "
        f"or use models.{name}.dtype=float32 (bfloat16 instead of float16)"
    )


def _stuck(name: str, step: int, count: int) -> str:
    return (
        f"step {step}: the last {count} updates of models.{name} were all skipped, since its gradients are not finite; "
        f"{_advice(name)}; callbacks.non_finite.max_skipped allows more"
    )


def _destroyed(name: str, step: int, norm: float) -> str:
    return (
        f"step {step}: the gradient norm of models.{name} is {norm} and the update was applied, so its weights are "
        f"lost; start again from weights before this step: {_advice(name)}"
    )
