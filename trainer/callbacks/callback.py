"""The moments of a run that callbacks and tasks can act in, and the dispatch to those who do."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from trainer.task import Batch, StepOutput, TaskModule
    from trainer.trainer import MultiModelTrainer


class Callback:
    """Acts at named moments of a run; override only what you need. All hooks run on every rank."""

    order: int = 0  # lower hears first; ties keep the order of the configuration

    def setup(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        """All models are prepared; stage is "fit" or "validate"."""

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        """Before the first validation."""

    def on_train_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        """After the first validation, before the first step."""

    def on_train_epoch_start(self, trainer: MultiModelTrainer, task: TaskModule, epoch: int) -> None:
        """Before the first window of an epoch."""

    def on_train_step_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        """Before a window of micro-batches; step counts from 1."""

    def on_train_batch_start(self, trainer: MultiModelTrainer, task: TaskModule, batch: Batch, batch_idx: int) -> None:
        """Before a micro-batch's training_step; batch_idx counts within the window."""

    def on_before_backward(self, trainer: MultiModelTrainer, task: TaskModule, name: str, loss: Tensor) -> None:
        """Before a loss is backpropagated, weighted by its items' share; name is a model's or "joint"."""

    def on_after_backward(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        """After a loss was backpropagated."""

    def on_train_batch_end(
        self, trainer: MultiModelTrainer, task: TaskModule, output: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """After a micro-batch's losses were backpropagated."""

    def on_before_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        """All losses of the window are known to be finite on all ranks; before this model's update."""

    def on_after_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        """After this model's update and its schedule's step."""

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        """After a window; `metrics` is reduced over all ranks and may be added to: it is logged when `is_log_step`."""

    def on_train_epoch_end(self, trainer: MultiModelTrainer, task: TaskModule, epoch: int) -> None:
        """After the last window of an epoch."""

    def on_save_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        """Before a checkpoint is taken of the run as it is after a step."""

    def on_save_end(self, trainer: MultiModelTrainer, task: TaskModule, path: Path | None) -> None:
        """Training goes on; path is the checkpoint, None where it failed or is still being written."""

    def on_validation_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        """Before a validation; all models are in eval mode."""

    def on_validation_batch_end(
        self, trainer: MultiModelTrainer, task: TaskModule, batch: Batch, batch_idx: int
    ) -> None:
        """After a validation_step."""

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        """After a validation; `metrics` ("val/...") is reduced over all ranks and may be added to."""

    def on_train_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        """After the last step, before the last validation."""

    def on_fit_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        """After the last validation."""

    def on_exception(self, trainer: MultiModelTrainer, task: TaskModule, exception: BaseException) -> None:
        """The run fails with this; on the rank that raised."""

    def teardown(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        """The last call, also after an exception: close what is open."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what must survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


def check_hook_names(owner: type, *, base: type) -> None:
    """Raises TypeError when a class has another base, or an `on_...` that no hook has: it would never run."""
    if not issubclass(owner, base):
        raise TypeError(f"{owner.__qualname__} is no {base.__name__}; derive it from trainer.{base.__name__}")
    for cls in owner.__mro__[: owner.__mro__.index(base)]:
        for name in vars(cls):
            if name.startswith("on_") and name not in HOOKS:
                near = difflib.get_close_matches(name, HOOKS, 1)
                hint = f"did you mean {near[0]}?" if near else f"hooks are: {', '.join(HOOKS)}"
                raise TypeError(f"{owner.__qualname__}.{name} is no hook and would never run; {hint}")


class HookCaller:
    """Finds once who listens to which hook; a hook that nobody overrides costs nothing."""

    def __init__(self, trainer: MultiModelTrainer, task: TaskModule, callbacks: dict[str, Callback]) -> None:
        self.trainer, self.task = trainer, task
        ordered = sorted(callbacks.items(), key=lambda item: item[1].order)
        self.listeners: dict[str, list[tuple[str, Callable[..., None]]]] = {
            hook: self._task_listener(hook) + self._callback_listeners(hook, ordered) for hook in HOOKS
        }

    def _task_listener(self, hook: str) -> list[tuple[str, Callable[..., None]]]:
        method = getattr(self.task, hook, None)
        return [("task", method)] if method is not None else []

    def _callback_listeners(
        self, hook: str, callbacks: list[tuple[str, Callback]]
    ) -> list[tuple[str, Callable[..., None]]]:
        def bound(callback: Callback) -> Callable[..., None]:
            method = getattr(callback, hook)
            return lambda **payload: method(self.trainer, self.task, **payload)

        return [
            (f"callback '{name}' ({type(callback).__name__})", bound(callback))
            for name, callback in callbacks
            if getattr(type(callback), hook) is not getattr(Callback, hook)
        ]

    def emit(self, hook: str, **payload: Any) -> None:
        """Calls every listener, the task first; an error says who raised it and when."""
        for who, listener in self.listeners[hook]:
            try:
                listener(**payload)
            except Exception as error:
                error.add_note(f"raised by {who} in {hook} at step {self.trainer.global_step}")
                raise
