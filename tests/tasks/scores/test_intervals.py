"""The intervals of a share and of a mean, against textbook values and by simulation."""

from __future__ import annotations

import statistics

import pytest
import torch

from tasks.scores.intervals import SampleMean, wilson_interval


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


def test_a_mean_lies_within_two_standard_errors_of_what_is_there() -> None:
    values, sample = [0.5, 1.5, 0.0, 1.0, 0.25], SampleMean()
    sample.add(torch.tensor(values[:2]))
    sample.add(torch.tensor([*values[2:], float("nan")]))

    found = sample.interval("reward", torch.device("cpu"))

    half = 1.959964 * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    assert found == pytest.approx({"reward_low": mean - half, "reward_high": mean + half}, rel=1e-6)


def test_one_example_has_no_interval() -> None:
    sample = SampleMean()
    sample.add(torch.tensor([0.3]))

    assert sample.interval("reward", torch.device("cpu")) == {}
