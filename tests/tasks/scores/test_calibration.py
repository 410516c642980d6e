"""Wins and calibration, by hand."""

from __future__ import annotations

import pytest
import torch

from tasks.scores.calibration import bin_gaps, expected_error, wins


def test_equal_scores_are_half_a_win() -> None:
    assert wins(torch.tensor([0.1, 0.0, -0.1])).tolist() == [1.0, 0.5, 0.0]


def test_gaps_are_right_minus_confidence_by_bin_of_confidence() -> None:
    chances = torch.tensor([0.52, 0.48, 0.93, 0.97, 0.5], dtype=torch.float64)  # that the preferred side wins

    gaps = bin_gaps(torch.logit(chances))

    # 0.52 right, 0.48 is a wrong 0.52, a tie is half right at 0.5: bin 0; 0.93: bin 8; 0.97: bin 9
    assert gaps.tolist() == pytest.approx([0.48 - 0.52 + 0.0, *[0.0] * 7, 0.07, 0.03], abs=1e-9)
    assert expected_error((gaps / 5).tolist()) == pytest.approx((0.04 + 0.07 + 0.03) / 5)


def test_a_model_that_is_as_sure_as_it_is_right_has_no_error() -> None:
    margins = torch.logit(torch.tensor([0.75] * 3 + [0.25], dtype=torch.float64))

    assert expected_error((bin_gaps(margins) / 4).tolist()) == pytest.approx(0, abs=1e-12)


def test_certain_pairs_stay_in_the_last_bin() -> None:
    gaps = bin_gaps(torch.tensor([1000.0, -1000.0]))

    assert gaps.tolist() == pytest.approx([0.0] * 9 + [-1.0])
