"""The windows of a run: each prepared once, and trained on for as many global steps as the task passes over it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainer import distributed
from trainer.config import ConfigError
from trainer.data.device import to_device
from trainer.data.loader import MicroBatch
from trainer.task import Batch
from trainer.window import Window

if TYPE_CHECKING:
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a global step trains on.

    Args:
        passed: How many steps have trained on the same window before.
    """

    epoch: int
    begins_epoch: bool
    ends_epoch: bool
    passed: int
    micro_batches: list[MicroBatch]


class Rollouts:
    """Prepares windows, and keeps the last one for the steps that pass over it again.

    What was prepared, such as generated text, is part of a checkpoint between two passes: a run that goes on trains on
    the same. With other ranks or micro-batches it is prepared anew, by the models as they are then.
    """

    def __init__(self, trainer: MultiModelTrainer) -> None:
        passes = trainer.task.passes
        if not (isinstance(passes, int) and not isinstance(passes, bool) and passes >= 1):
            name = type(trainer.task).__name__
            raise ConfigError(f"{name}.passes={passes!r}: must be a whole number of at least 1")
        self.trainer, self.passes = trainer, passes
        self._prepared: list[Batch] | None = None
        self._indices: list[dict[str, list[int]]] = []

    def turns(self, start_step: int) -> Iterator[Turn]:
        """Yields what the global steps after `start_step` train on, forever."""
        loader = self.trainer.train_loader
        assert loader is not None
        number, passed = divmod(start_step, self.passes)
        for epoch, index, micro_batches in loader.windows(number):
            for done in range(passed, self.passes):
                yield Turn(
                    epoch=epoch,
                    begins_epoch=index == 0 and done == 0,
                    ends_epoch=index == loader.steps_per_epoch - 1 and done == self.passes - 1,
                    passed=done,
                    micro_batches=micro_batches,
                )
            passed = 0

    def window(self, turn: Turn) -> Window:
        """Returns the micro-batches of a turn, prepared and counted; every rank must call it."""
        trainer, micro_batches = self.trainer, turn.micro_batches
        indices = [{name: list(rows) for name, rows in micro.indices.items()} for micro in micro_batches]
        is_kept = turn.passed > 0 and self._prepared is not None and indices == self._indices
        if self.passes == 1 or distributed.any_rank(not is_kept, device=trainer.device):
            if turn.passed > 0 and trainer.is_main:
                log.warning("the window is prepared anew: it was prepared for other ranks or micro-batches")
            self._prepared, self._indices = self._prepare(micro_batches), indices
        assert self._prepared is not None
        fillers = [micro.is_filler for micro in micro_batches]
        window = Window(trainer.task, self._prepared, fillers, device=trainer.device, indices=indices)
        if turn.passed == self.passes - 1:
            self._prepared = None
        return window

    @torch.no_grad()
    def _prepare(self, micro_batches: list[MicroBatch]) -> list[Batch]:
        trainer = self.trainer
        self._prepared, batches = None, []
        for micro in micro_batches:
            trainer.enter_batch(is_filler=micro.is_filler, indices=micro.indices)
            batches.append(trainer.task.prepare_batch(to_device(micro.batch, trainer.device)))
        prepared = trainer.task.prepare_window(batches, is_filler=[micro.is_filler for micro in micro_batches])
        if len(prepared) != len(micro_batches):
            raise ValueError(
                f"prepare_window returned {len(prepared)} micro-batches of {len(micro_batches)}; return one for each"
            )
        return prepared

    def state_dict(self) -> dict[str, Any]:
        """Returns what was prepared and is to be passed over again, {} between windows."""
        return {} if self._prepared is None else {"batches": self._prepared, "indices": self._indices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned on this rank; {}: nothing was kept for it."""
        if state:
            self._prepared = [to_device(batch, self.trainer.device) for batch in state["batches"]]
            self._indices = state["indices"]
