"""Means that are right over micro-batches and ranks: sums and counts, reduced together, divided last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer import distributed
from trainer.task import Metric


class Tally:
    """Collects sums and counts by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds a sum over `count` items, both ()."""
        self._sums[name] = self._sums.get(name, 0) + self._plain(total)
        self._counts[name] = self._counts.get(name, 0) + self._plain(count)

    def add_metric(self, name: str, value: Metric, items: Tensor | float, *, weight: float = 1.0) -> None:
        """Adds a mean over `items`, or a (sum, count); weight 0 for a filler whose numbers must not count."""
        _check_metric(name, value)
        total, count = value if isinstance(value, tuple) else (self._plain(value) * self._plain(items), items)
        if weight == 0:
            total, count = 0.0, 0.0  # not a product: a filler's NaN must not count either
        self.add(name, total, count)

    def _plain(self, value: Tensor | float) -> Tensor:
        # float32 on devices without float64; sums of up to a window's items are exact enough in either.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.as_tensor(value).detach().reshape(()).to(self.device, dtype)

    def reduce(self) -> dict[str, float]:
        """Returns name to mean over all ranks; every rank must call it with the same names. 0 items give 0."""
        return {name: total / count if count else total for name, (total, count) in self._totals().items()}

    def reduce_counted(self) -> dict[str, float]:
        """Returns the same without the names that have no item on any rank: there is nothing that a 0 would measure."""
        return {name: total / count for name, (total, count) in self._totals().items() if count}

    def _totals(self) -> dict[str, tuple[float, float]]:
        """Returns name to sum and count over all ranks, in the order in which they came."""
        names = sorted(self._sums)
        distributed.check_alike(names, what="losses and metrics", device=self.device)
        if not names:
            return {}
        table = torch.stack([torch.stack([self._sums[name], self._counts[name]]) for name in names])
        totals = dict(zip(names, distributed.sum_over_ranks(table).cpu().tolist(), strict=True))
        return {name: (totals[name][0], totals[name][1]) for name in self._sums}


def _check_metric(name: Any, value: Any) -> None:
    """Raises ValueError for what has no mean over items."""
    numbers = value if isinstance(value, tuple) else (value,)
    is_right = (len(numbers) == 2 or not isinstance(value, tuple)) and all(
        number.numel() == 1 if isinstance(number, Tensor) else isinstance(number, int | float) for number in numbers
    )
    if not isinstance(name, str):
        raise ValueError(f"the name {name!r} of a metric must be text, such as 'student/forward_kl'")
    if not is_right:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the metric '{name}' is {shown}; it must be one number, or a pair (sum, count)")
