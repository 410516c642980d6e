"""How often the preferred of two answers has the higher score, and how far the probabilities that follow are right."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NUM_BINS = 10


def wins(differences: Tensor) -> Tensor:
    """Returns 1 where the preferred side has the higher score, 0 where it has the lower, 1/2 where both are equal."""
    return (differences > 0).float() + (differences == 0).float() / 2


def bin_gaps(differences: Tensor, *, num_bins: int = NUM_BINS) -> Tensor:
    """Returns, for each bin of confidence, the sum of right minus confidence over its pairs, (num_bins,) in float64.

    sigmoid(difference) is the probability that the preferred side is the better one; the confidence is that of the side
    with the higher score, from 1/2 to 1, in bins of equal width.

    Args:
        differences: Score of the preferred side minus that of the other, (N,).
    """
    confidence = torch.sigmoid(differences.double().abs())
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gaps = torch.zeros(num_bins, dtype=torch.float64, device=differences.device)
    return gaps.index_add(0, bins, wins(differences).double() - confidence)


def expected_error(gaps: Iterable[float]) -> float:
    """Returns the expected calibration error (Guo et al., arXiv:1706.04599, eq. 3).

    Args:
        gaps: Those of all bins, each divided by the number of all pairs.
    """
    return sum(abs(gap) for gap in gaps)
