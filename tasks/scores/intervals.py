"""How sure a share or a mean is that was measured on a sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer import sum_over_ranks

Z_95 = 1.959963984540054  # of a normal distribution: 95 % lie within so many standard deviations


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Returns the lower and upper end of the 95 % interval of a share of `count` independent examples.

    E. B. Wilson's score interval (1927), which stays within 0 and 1 and is of use for few examples.
    """
    if count <= 0:
        return 0.0, 1.0
    spread = Z_95**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


class SampleMean:
    """The mean of a number over the examples of all ranks, whose interval follows from how much they differ."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # of ones, values, squares

    def add(self, values: Tensor) -> None:
        """Takes in the values of some examples, (B,); NaN where an example has none."""
        known = values[~values.isnan()].double().cpu()
        self._sums += torch.stack([torch.ones_like(known), known, known.square()]).sum(1)

    def interval(self, name: str, device: torch.device) -> dict[str, float]:
        """Returns both ends of the 95 % interval, by the normal distribution, as <name>_low and <name>_high.

        None of fewer than two examples. Every rank must call it.
        """
        count, total, squares = sum_over_ranks(self._sums.to(device)).tolist()
        if count < 2:
            return {}
        mean = total / count
        half = Z_95 * math.sqrt(max(0.0, squares / count - mean**2) / (count - 1))
        return {f"{name}_low": mean - half, f"{name}_high": mean + half}
