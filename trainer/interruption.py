"""Acts on what signals ask of a run: all ranks alike, whichever of them was asked."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

import torch

from trainer import distributed, signals

if TYPE_CHECKING:
    from trainer.trainer import MultiModelTrainer


log = logging.getLogger(__name__)


def heed(requests: signals.Requests, *, trainer: MultiModelTrainer, between_steps: bool) -> None:
    """Saves the run, or saves and ends it, where a signal to any rank asks for that; every rank must call it.

    Args:
        between_steps: Not within a validation, which only a request to end the run cuts short.
    """
    saver = trainer.saver
    mine = [
        requests.stop == signal.SIGTERM,
        requests.stop == signal.SIGINT,
        requests.save,
        saver is not None and saver.is_writing,
    ]
    totals = distributed.sum_over_ranks(torch.tensor(mine, dtype=torch.float32, device=trainer.device)).tolist()
    terminate, interrupt, save, anyone_writes = (total > 0 for total in totals)
    stops = terminate or interrupt
    if saver is not None and between_steps:
        saver.poll(trainer, anyone_writes=anyone_writes)
    if stops or (save and between_steps):
        requests.save = False
        if saver is not None:
            saver.save(trainer, wait=True)
        elif trainer.is_main:
            log.warning("nothing is saved: this run writes no checkpoints")
    if stops:
        requests.take()
        if saver is not None and saver.problem is not None:
            raise RuntimeError(saver.problem)
        raise signals.error_of(signal.SIGTERM if terminate else signal.SIGINT)
