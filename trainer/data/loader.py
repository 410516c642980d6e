"""Micro-batches in the planned order: windows to train on, forever, and the validation set once."""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config import ConfigError
from trainer.data.order import BatchPlan, Micro
from trainer.task import Batch

Collate = Callable[[list[Any]], Batch]


SHARED = ""  # the name of the examples that are no model's own


def data_key(name: str, part: str) -> str:
    """Returns where a set stands in the configuration, such as models.critic.data.train.

    Args:
        name: The model whose own it is, or SHARED.
        part: "train" or "validation".
    """
    return f"data.{part}" if name == SHARED else f"models.{name}.data.{part}"


@dataclass(kw_only=True)
class MicroBatch:
    """One collated micro-batch.

    Args:
        fillers: Whose examples keep the ranks in step only and must count for nothing: by model with data of its own,
            SHARED for all others.
        indices: Which examples it holds, by the same names: positions in the set.
    """

    batch: Batch
    fillers: Mapping[str, bool]
    indices: Mapping[str, list[int]]

    @property
    def is_filler(self) -> bool:
        """Whether no example of it counts."""
        return all(self.fillers.values())

    def is_filler_for(self, name: str) -> bool:
        """Returns whether it counts for nothing in a model's numbers."""
        return self.fillers.get(name, self.fillers.get(SHARED, any(self.fillers.values())))


class TrainLoader:
    """Windows of micro-batches in an order that the seed decides; any position can be entered directly."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        collate: Collate,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        num_workers: int = 0,
        name: str = SHARED,
        wraps: bool = False,
    ) -> None:
        self.dataset, self.collate, self.num_workers, self.name = dataset, collate, num_workers, name
        self.plan = BatchPlan(
            _num_examples(dataset, name, "train"),
            batch_size=batch_size,
            accumulation=accumulation,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=True,
            wraps=wraps,
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.num_windows

    def windows(self, start_step: int = 0) -> Iterator[tuple[int, int, list[MicroBatch]]]:
        """Yields (epoch, step in the epoch, micro-batches) forever; examples before start_step are never read."""
        plan = self.plan
        micros = _Indices(lambda: (micro for *_, window in plan.windows(start_step) for micro in window))
        batches = _batches(self.dataset, micros, collate=self.collate, num_workers=self.num_workers)
        for epoch, step, window in plan.windows(start_step):
            yield (
                epoch,
                step,
                [_named(self.name, micro, next(batches)) for micro in window],
            )


class ValidationLoader:
    """The validation set once, in its own order, shared out over the ranks; each pass is the same."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        collate: Collate,
        batch_size: int,
        rank: int,
        world_size: int,
        limit_batches: int | None = None,
        num_workers: int = 0,
        name: str = SHARED,
    ) -> None:
        self.dataset, self.collate, self.num_workers, self.name = dataset, collate, num_workers, name
        self.plan = BatchPlan(
            _num_examples(dataset, name, "validation"),
            batch_size=batch_size,
            accumulation=1,
            rank=rank,
            world_size=world_size,
            seed=0,
            shuffle=False,
        )
        self.num_batches = min(self.plan.num_windows, limit_batches or self.plan.num_windows)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        micros = [micro for *_, window in islice(self.plan.windows(), self.num_batches) for micro in window]
        batches = _batches(self.dataset, _Indices(lambda: micros), collate=self.collate, num_workers=self.num_workers)
        for micro in micros:
            yield _named(self.name, micro, next(batches))


def _named(name: str, micro: Micro, batch: Batch) -> MicroBatch:
    return MicroBatch(batch=batch, fillers={name: micro.is_filler}, indices={name: micro.indices})


class _Indices:
    """The batch sampler of torch's DataLoader: lists of indices, as often as it asks."""

    def __init__(self, micros: Callable[[], Iterable[Micro]]) -> None:
        self.micros = micros

    def __iter__(self) -> Iterator[list[int]]:
        return (micro.indices for micro in self.micros())


def _batches(dataset: Dataset[Any], indices: _Indices, *, collate: Collate, num_workers: int) -> Iterator[Batch]:
    # Without a generator of its own DataLoader draws its workers' seed from the global one.
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        dataset,
        batch_sampler=indices,
        collate_fn=collate,
        num_workers=num_workers,
        generator=generator,
        worker_init_fn=_outlive_signals,
    )
    return iter(loader)


def _outlive_signals(worker: int) -> None:
    """Keeps a worker at work while its rank finishes a step: Ctrl-C and some launchers signal every process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _num_examples(dataset: Dataset[Any], name: str, part: str) -> int:
    num_examples = len(dataset)  # type: ignore[arg-type]  # map-style: torch's base class has no __len__
    if num_examples == 0:
        raise ConfigError(f"{data_key(name, part)} holds no examples; at least one is needed")
    return num_examples
