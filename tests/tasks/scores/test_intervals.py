"""The interval of a share, against textbook values and by simulation."""

from __future__ import annotations

import pytest
import torch

from tasks.scores.intervals import wilson_interval


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (29, 29, 0.8830, 1.0)],
)
def test_ends_are_those_of_newcombe_1998(hits: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=1e-4)


def test_nothing_is_known_of_no_example() -> None:
    assert wilson_interval(0.5, 0) == (0.0, 1.0)


def test_no_end_leaves_the_unit() -> None:
    assert wilson_interval(1.0, 3)[1] == 1.0


def test_the_true_share_lies_within_it_in_19_of_20_samples() -> None:
    draws = torch.rand(4000, 60, generator=torch.Generator().manual_seed(0)) < 0.7

    ends = [wilson_interval(float(row.float().mean()), 60) for row in draws]

    assert sum(low <= 0.7 <= high for low, high in ends) / len(ends) == pytest.approx(0.95, abs=0.02)
