"""A window of micro-batches: its items, counted over all ranks, and the weight of each loss that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import distributed
from trainer.task import JOINT, Batch, StepOutput, TaskModule

EVERY = "*"  # the count of a task that gives one number for all its losses


def owner(key: str) -> str:
    """Returns the model of a loss key: "student" for "student" and "student/forward_kl"."""
    return key.partition("/")[0]


class Window:
    """The micro-batches of one global step on this rank, prepared and counted.

    Args:
        indices: Which examples each holds, by the set's name, where that is known.
    """

    def __init__(
        self,
        task: TaskModule,
        batches: Sequence[Batch],
        is_filler: Sequence[bool],
        *,
        device: torch.device,
        indices: Sequence[Mapping[str, Sequence[int]]] | None = None,
    ) -> None:
        self.batches, self.is_filler = list(batches), list(is_filler)
        self.indices = list(indices) if indices is not None else [{} for _ in self.batches]
        for batch in self.batches:
            if not isinstance(batch, Mapping):
                raise ValueError(f"prepare_batch returned {type(batch).__name__}; return the batch to train on, a dict")
        counts = [checked_counts(task.count_items(batch)) for batch in self.batches]
        _check_same_keys(counts)
        self._keys = sorted(counts[0])
        distributed.check_alike(self._keys, what="counts of count_items", device=device)
        self._local = self._table(counts, device)  # (micro-batch, key)
        self._global = distributed.sum_over_ranks(self._local)
        self.empty = [key for key, total in zip(self._keys, self._totals(), strict=True) if total == 0]

    def _totals(self) -> list[float]:
        """Returns the items of the window by key, over all ranks, or raises ValueError for what is no count."""
        lowest, totals = torch.stack([self._local.amin(0), self._global.sum(0)]).tolist()
        for key, low, total in zip(self._keys, lowest, totals, strict=True):
            if not (low >= 0 and total < math.inf):  # neither does a NaN
                name = "count_items" if key == EVERY else f"count_items' '{key}'"
                raise ValueError(f"{name} is {low} in a micro-batch; it must be a finite number of at least 0")
        return list(totals)

    def _table(self, counts: list[dict[str, int | Tensor]], device: torch.device) -> Tensor:
        rows = [
            torch.stack([torch.as_tensor(count[key]).reshape(()).to(device, torch.float64) for key in self._keys])
            * (not filler)
            for count, filler in zip(counts, self.is_filler, strict=True)
        ]
        return torch.stack(rows)

    def __len__(self) -> int:
        return len(self.batches)

    def ends_update(self, index: int, accumulation: int) -> bool:
        """Returns whether an update follows this micro-batch, for a model with so many micro-batches per update."""
        return (index + 1) % accumulation == 0 or index == len(self) - 1

    def num_updates(self, accumulation: int) -> int:
        """Returns how many updates this window has for such a model."""
        return -(-len(self) // accumulation)

    def items(self, index: int, key: str) -> Tensor:
        """Returns this rank's items of a micro-batch for a loss or metric key, ()."""
        return self._local[index, self._column(key)]

    def weight(self, index: int, key: str, *, accumulation: int, is_sum: bool) -> Tensor:
        """Returns what a loss is multiplied by so that the update is a mean over the items of all ranks, ().

        The engines average gradients over ranks, hence the factor world_size:
        mean * items * world_size / global_items, or sum * world_size / global_items. 0 where no item counts.

        Args:
            accumulation: Micro-batches per update of the models that the loss trains.
        """
        column = self._column(key)
        first = index - index % accumulation
        total = self._global[first : first + accumulation, column].sum()
        numerator = self._local[index, column] if not is_sum else float(not self.is_filler[index])
        weight = numerator * distributed.world_size() / total.clamp(min=1)
        return torch.where(total > 0, weight, torch.zeros_like(total)).float()

    def _column(self, key: str) -> int:
        for candidate in (key, owner(key), EVERY):
            if candidate in self._keys:
                return self._keys.index(candidate)
        names = " or ".join(f"'{name}'" for name in dict.fromkeys((key, owner(key))))
        raise ValueError(
            f"count_items gives counts for {', '.join(self._keys)}, but there is a loss or metric '{key}'; "
            f"return one number for all, or a count for {names}"
        )


def checked_counts(count: int | Tensor | dict[str, int | Tensor]) -> dict[str, int | Tensor]:
    """Returns a task's counts by loss key, or raises ValueError for what is no count.

    Tensors are looked at by their shape only, not to wait for the device.
    """
    counts = count if isinstance(count, dict) else {EVERY: count}
    for key, value in counts.items():
        name = "count_items" if key == EVERY else f"count_items' '{key}'"
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; return one number for the micro-batch")
        if not isinstance(value, Tensor) and not _is_count(value):
            raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
    return counts


def _check_same_keys(counts: Sequence[dict[str, int | Tensor]]) -> None:
    for count in counts:
        if not count or count.keys() != counts[0].keys():
            raise ValueError(
                f"count_items returned counts for {list(count)} of one micro-batch and {list(counts[0])} of another; "
                "return the same keys, at least one, for every micro-batch"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def check_output(output: StepOutput, trained: Sequence[str]) -> None:
    """Raises ValueError for what is no loss of a trained model, each by its name."""
    keys = [*output.losses, *output.sums, *output.shares]
    check_keys(keys, trained)
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"training_step returned '{key}' twice, of losses, sums and shares; give one of them")
    for key, loss in {**output.losses, **output.sums, **output.shares}.items():
        if not isinstance(loss, Tensor):
            raise ValueError(f"the loss '{key}' is of type {type(loss).__name__}; it must be a tensor of one number")
        if loss.numel() != 1:
            raise ValueError(f"the loss '{key}' has shape {tuple(loss.shape)}; return its mean, or its sum in sums")


def check_keys(keys: Sequence[str], trained: Sequence[str]) -> None:
    """Raises ValueError for a loss key that belongs to no trained model."""
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"training_step returned a loss under {key!r}; name it by its model, in text")
        if owner(key) not in trained and owner(key) != JOINT:
            raise ValueError(
                f"training_step returned a loss for '{key}', but the trained models are {', '.join(trained)}; "
                f"use one of these, or '{JOINT}' for one loss through several"
            )
