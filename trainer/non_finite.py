"""What becomes of updates whose losses or gradients are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.config import NON_FINITE
from trainer.incident import Incident, MicroRecord, WindowRecord, named_examples, named_sources
from trainer.task import NonFiniteError
from trainer.window import Window

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NonFinitePolicy:
    """An update whose losses or gradients are not finite is never applied; this says how the run goes on.

    Args:
        action: "stop": not at all; "skip": with the next window.
        max_skipped: Updates of one model in a row that may be left out; one more ends the run.
    """

    action: str = "stop"
    max_skipped: int = 10

    def __post_init__(self) -> None:
        if self.action not in NON_FINITE:
            raise ValueError(f"non_finite={self.action!r}: must be one of {', '.join(NON_FINITE)}")
        if self.max_skipped < 0:
            raise ValueError(f"max_skipped={self.max_skipped}: must be at least 0")

    @property
    def stops(self) -> bool:
        """Whether one such update ends the run."""
        return self.action == "stop"


class NonFiniteGuard:
    """Watches over the updates of one window; what it decides from is the same on all ranks."""

    def __init__(self, trainer: MultiModelTrainer, window: Window) -> None:
        self.trainer, self.step, self.record = trainer, trainer.global_step + 1, WindowRecord(window)
        self._losses: dict[str, float] = {}  # by owner, over all ranks
        self._grad_norms: dict[str, float | None] = {}  # of the updates of this window
        self._problem = ""  # of its losses; once there is one, no update follows

    def refuses(self, losses: Mapping[str, float], stepping: list[ModelHandle]) -> bool:
        """Discards the updates that would follow a loss that is not finite, or ends the run; else returns False.

        Those of all models: they learn from the same examples. And to the end of the window: its losses are sums.

        Args:
            losses: "<owner>/loss", of the window so far, over all ranks.
        """
        self._losses = {name.removesuffix("/loss"): value for name, value in losses.items()}
        bad = {name: value for name, value in self._losses.items() if not math.isfinite(value)}
        if not bad:
            return False
        if not self._problem:
            self._report(bad)
        for model in stepping:
            model.discard()
        for model in stepping:
            self._check_bound(model, self._problem)
        return True

    def _report(self, bad: Mapping[str, float]) -> None:
        micro_batches = self.record.gather()
        problem = (
            f"the loss of {', '.join(f'{name} is {value}' for name, value in bad.items())} at step {self.step} "
            f"(not finite: {named_sources(micro_batches)}); no model was updated"
        )
        if self._grad_norms:
            problem += f" after that ({', '.join(self._grad_norms)} had been, earlier in the step)"
        examples = named_examples(micro_batches)
        problem += f". It came from examples {examples}." if examples else "."
        if self.trainer.non_finite.stops:
            raise self._end(
                problem,
                micro_batches,
                advice="Is a mean taken over no items, a logarithm of 0, or is the learning rate too high? "
                "trainer.non_finite=skip goes on without such a step.",
            )
        self._problem = problem
        self._warn(problem)

    def check_update(self, model: ModelHandle) -> None:
        """Looks at an update that was just made, or left out since its gradients are not finite."""
        norm, name = model.grad_norm(), model.name
        self._grad_norms[name] = norm
        if not model.was_update_applied():
            self._report_skipped(model)
        elif norm is not None and not math.isfinite(norm):
            raise self._end(
                f"the gradient norm of {name} is {norm} at step {self.step} and the update was applied, since "
                f"models.{name}.plugin.bf16.check_grad_overflow=false; its weights are lost.",
                self.record.gather(),
                advice=f"Start again from weights before this step: {_advice(model)}.",
            )

    def _report_skipped(self, model: ModelHandle) -> None:
        problem = (
            f"the gradients of {model.name} are not finite at step {self.step}, though every loss is; "
            "its update was left out."
        )
        # A loss scale that is too high shows like this, and falls until it fits.
        if self.trainer.non_finite.stops and model.loss_scale() is None:
            advice = f"To go on from the last checkpoint: trainer.non_finite=skip. For a new run: {_advice(model)}."
            raise self._end(problem, self.record.gather(), advice=advice)
        self._warn(problem)
        self._check_bound(model, problem)

    def _check_bound(self, model: ModelHandle, problem: str) -> None:
        count, bound = model.skipped_in_a_row, self.trainer.non_finite.max_skipped
        if count > bound:
            raise self._end(
                f"{problem} The last {count} updates of {model.name} were left out like this; trainer.max_skipped is "
                f"{bound}.",
                self.record.gather(),
                advice=f"For a new run: {_advice(model)}.",
            )

    def _warn(self, problem: str) -> None:
        if self.trainer.is_main:
            log.warning("%s", problem)

    def _end(self, problem: str, micro_batches: list[MicroRecord], *, advice: str) -> NonFiniteError:
        """Returns the error that ends the run, once what is known is on disk."""
        incident = Incident(
            step=self.step,
            seed=self.trainer.seed,
            problem=problem,
            losses=self._losses,
            grad_norms=self._grad_norms,
            skipped_in_a_row={model.name: model.skipped_in_a_row for model in self.trainer.trained},
            micro_batches=micro_batches,
        )
        place = incident.write(self.trainer.folder)
        if self.trainer.saver is not None:
            self.trainer.saver.finish(self.trainer)  # what is written in the background is of a step before this one
        return NonFiniteError(" ".join(part for part in (problem, place, advice) if part))


def _advice(model: ModelHandle) -> str:
    wider = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}.get(model.dtype)
    ways = [f"lower models.{model.name}.optimizer.lr", f"set models.{model.name}.max_grad_norm=1.0"]
    return " or ".join([", ".join(ways), *([f"use models.{model.name}.dtype={wider}"] if wider else [])])
