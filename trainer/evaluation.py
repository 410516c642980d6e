"""One pass over the validation set: what the task measures, as means over the items of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import torch

from trainer.data.device import to_device
from trainer.seeds import seed_everything
from trainer.tally import Tally
from trainer.window import EVERY, checked_counts, owner

if TYPE_CHECKING:
    from trainer.trainer import MultiModelTrainer

REFERENCE = "reference/"


@torch.no_grad()
def evaluate(
    trainer: MultiModelTrainer, *, on_batch: Callable[..., None] | None, limit_batches: int | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics of the trained models, and those of the task's reference model, by "val/<name>".

    Only `derive_metrics` sees those whose last part begins with "_". One without an item on any rank is left out.

    Args:
        on_batch: Hears of each micro-batch.
    """
    assert trainer.validation_loader is not None
    # Draws of a validation are the same before, after, and for a model that was exported and loaded again.
    seed_everything(trainer.seed, "validation", trainer.rank)
    tally = Tally(trainer.device)
    for index, micro in enumerate(islice(trainer.validation_loader, limit_batches)):
        batch = to_device(micro.batch, trainer.device)
        items = checked_counts(trainer.task.count_items(batch))
        trainer.enter_batch(is_filler=micro.is_filler, indices=micro.indices)
        metrics = trainer.task.validation_step(batch, index)
        if not isinstance(metrics, dict):
            raise ValueError(f"validation_step returned {type(metrics).__name__}; return a dict of name to number")
        for name, value in {**metrics, **trainer.logged}.items():
            count = next((items[key] for key in (name, owner(name), EVERY) if key in items), 1)
            tally.add_metric(name, value, count, weight=0.0 if micro.is_filler_for(owner(name)) else 1.0)
        if on_batch is not None:
            on_batch(batch=batch, batch_idx=index)
    reduced = tally.reduce_counted()
    reference = {name.removeprefix(REFERENCE): reduced[name] for name in reduced if name.startswith(REFERENCE)}
    own = {name: value for name, value in reduced.items() if not name.startswith(REFERENCE)}
    return _complete(trainer, own), _complete(trainer, reference)


def _complete(trainer: MultiModelTrainer, metrics: dict[str, float]) -> dict[str, float]:
    derived = trainer.task.derive_metrics(dict(metrics)) if metrics else {}
    return {f"val/{name}": value for name, value in {**metrics, **derived}.items() if not _is_internal(name)}


def _is_internal(name: str) -> bool:
    return name.rpartition("/")[2].startswith("_")
