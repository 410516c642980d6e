"""One global step: a window of micro-batches, from their losses to the updates of the models."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.non_finite import NonFiniteGuard
from trainer.routing import Backward, receivers
from trainer.tally import Tally
from trainer.task import JOINT, StepOutput
from trainer.window import EVERY, Window, check_output, owner

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.trainer import MultiModelTrainer


log = logging.getLogger(__name__)


class Step:
    """Trains on one window; the hooks, the task and the models are the trainer's."""

    def __init__(self, trainer: MultiModelTrainer, window: Window) -> None:
        self.trainer, self.window = trainer, window
        self.tally = Tally(trainer.device)
        self.guard = NonFiniteGuard(trainer, window)
        self.reduced: dict[str, float] = {}
        self._losses: dict[str, None] = {}  # their names among the metrics, such as student/loss, in order
        self.updating = [model for model in trainer.trained if model.is_updating]
        _check_frozen(trainer.frozen)
        if window.empty and trainer.is_main:
            names = ", ".join(f"'{key}'" for key in window.empty if key != EVERY) or "any loss"
            log.warning("step %d: no item of any example counts for %s, which is 0", trainer.global_step + 1, names)

    def run(self) -> dict[str, float]:
        """Returns the metrics of the window, means over the items of all ranks."""
        trainer = self.trainer
        for index, batch in enumerate(self.window.batches):
            trainer.emit("on_train_batch_start", batch=batch, batch_idx=index)
            for model in self.updating:
                model.set_boundary(self.window.ends_update(index, model.accumulation))
            trainer.enter_batch(is_filler=self.window.is_filler[index], indices=self.window.indices[index])
            trainer.loss_weight = functools.partial(self._weight_of_sum, index)
            with torch.set_grad_enabled(bool(self.updating)):
                output = trainer.as_output(trainer.task.training_step(batch, index))
            self._backward(index, output)
            stepping = [model for model in self.updating if self.window.ends_update(index, model.accumulation)]
            if stepping or index == len(self.window) - 1:
                self._update(stepping)
            trainer.emit("on_train_batch_end", output=output, batch=batch, batch_idx=index)
        return self.reduced

    def _backward(self, index: int, output: StepOutput) -> None:
        trainer = self.trainer
        for name, (loss, group) in self._weighted_losses(index, output).items():
            trainer.emit("on_before_backward", name=name, loss=loss)
            Backward(name, group=group, trained=trainer.trained).run(loss)
            trainer.emit("on_after_backward", name=name)
        for model in trainer.trained:
            model.output_nodes.clear()  # or they would keep the graph
        weight = 0.0 if self.window.is_filler[index] else 1.0
        for name, value in {**output.metrics, **trainer.logged}.items():
            if name in self._losses:
                raise ValueError(f"the metric '{name}' is the trainer's own; give it another name")
            items = 0.0 if isinstance(value, tuple) else self.window.items(index, name)  # a pair brings its own count
            self.tally.add_metric(name, value, items, weight=weight)

    def _weighted_losses(self, index: int, output: StepOutput) -> dict[str, tuple[Tensor, list[ModelHandle]]]:
        """Returns one loss per backward, a share of the mean over the global batch, and the models that it trains."""
        check_output(output, [model.name for model in self.trainer.trained])
        groups = receivers([*output.losses, *output.sums, *output.shares], self.trainer.trained)
        totals: dict[str, Tensor] = {}
        for kind, losses in (("mean", output.losses), ("sum", output.sums), ("share", output.shares)):
            for key, loss in losses.items():
                name = owner(key)
                share = self._share(index, key, loss, accumulation=self._accumulation(name, groups), kind=kind)
                totals[name] = totals.get(name, 0) + share
        for name in groups:
            if not totals[name].requires_grad:
                raise ValueError(f"the loss '{name}' depends on no trained model's weights (it has no graph)")
        return {name: (totals[name], group) for name, group in groups.items()}

    def _accumulation(self, name: str, groups: Mapping[str, list[ModelHandle]]) -> int:
        """Returns the micro-batches per update of the models that a loss trains; where it trains none, of the trainer.

        The models of a joint loss have one accumulation, which `receivers` sees to.
        """
        return groups[name][0].accumulation if name in groups else self.trainer.gradient_accumulation_steps

    def _weight_of_sum(self, index: int, key: str) -> Tensor:
        """Returns what a sum over a micro-batch's items is multiplied by, before it is known which losses come."""
        name, updating = owner(key), self.updating
        steps = {model.accumulation for model in updating if name in (model.name, JOINT)}
        if len(steps) > 1:
            raise ValueError(f"the weight of '{key}': the gradient_accumulation_steps of the models differ, {steps}")
        accumulation = steps.pop() if steps else self.trainer.gradient_accumulation_steps
        return self.window.weight(index, key, accumulation=accumulation, is_sum=True)

    def _share(self, index: int, key: str, loss: Tensor, *, accumulation: int, kind: str) -> Tensor:
        """Returns a loss times its weight in the update that it belongs to, and adds it to the tally."""
        if kind == "share":
            weight: Tensor | float = 1.0
        else:
            weight = self.window.weight(index, key, accumulation=accumulation, is_sum=kind == "sum")
        # float32 at least: a bfloat16 loss times a weight would round the whole update
        share = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
        logged = share.detach() / (self.trainer.world_size * self.window.num_updates(accumulation))
        self._losses[f"{owner(key)}/loss"] = None
        self.tally.add(f"{owner(key)}/loss", logged, 0.0)
        self.guard.record.add(index, key, loss)
        return share

    def _update(self, stepping: list[ModelHandle]) -> None:
        """Steps the models whose accumulation ends here, once every loss is known to be finite on all ranks."""
        trainer, self.reduced = self.trainer, self.tally.reduce()
        losses = {name: self.reduced[name] for name in self._losses}
        self._show(losses)
        if self.guard.refuses(losses, stepping):
            return
        for model in stepping:
            trainer.emit("on_before_optimizer_step", name=model.name)
        for model in stepping:
            model.step()
            self.guard.check_update(model)
            trainer.emit("on_after_optimizer_step", name=model.name)

    def _show(self, losses: Mapping[str, float]) -> None:
        """Puts the losses among the metrics."""
        # A model that this step leaves out shows its last loss, as it does its last rate, or the sum would jump.
        last = self.trainer.last_losses
        shown = {**last, **losses}
        last.update({name: value for name, value in losses.items() if math.isfinite(value)})
        for model in self.trainer.trained:
            if model.has_ended and f"{model.name}/loss" not in losses:
                shown.pop(f"{model.name}/loss", None)
        self.reduced = {"loss": sum(shown.values()), **shown, **self.reduced}


def _check_frozen(frozen: list[ModelHandle]) -> None:
    for model in frozen:
        if any(parameter.requires_grad for parameter in model.module.parameters()):
            raise ValueError(
                f"models.{model.name} is frozen, but a weight of it requires a gradient, which no optimizer would use; "
                f"leave requires_grad as it is, or set models.{model.name}.trainable=true"
            )


def weigh_nothing(key: str) -> Tensor:
    """Refuses to give a loss's weight outside of a training step, where it has none."""
    raise ValueError(f"the weight of '{key}' in the global batch is known within training_step only")
