"""A mixture of teachers is a mixture of their distributions."""

import pytest
import torch

from tasks.losses import mix_teachers
from tests.tasks.losses.reference import random_logits


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_a_mixture_is_the_weighted_mean_of_the_probabilities(temperature):
    logits = [random_logits(3, 4, 100, seed=seed) for seed in range(3)]

    mixed = mix_teachers(logits, [1.0, 2.0, 5.0], temperature=temperature)

    exact = sum(
        weight / 8 * (each.double() / temperature).softmax(-1) for weight, each in zip((1, 2, 5), logits, strict=True)
    )
    assert mixed.dtype == torch.float32 and mixed.shape == (3, 4, 100)
    torch.testing.assert_close((mixed.double() / temperature).softmax(-1), exact, rtol=1e-5, atol=1e-8)


def test_one_teacher_and_weight_zero_leave_a_distribution_as_it_is():
    first, second = random_logits(4, 100, seed=0), torch.full((4, 100), torch.nan)

    for mixed in (mix_teachers([first], [3.0]), mix_teachers([first, second], [2.0, 0.0])):
        torch.testing.assert_close(mixed.softmax(-1), first.softmax(-1), rtol=1e-5, atol=1e-8)


def test_what_one_teacher_excludes_keeps_the_share_of_the_other():
    first, second = torch.tensor([[0.0, -torch.inf, -torch.inf]]), torch.tensor([[0.0, 0.0, -torch.inf]])

    mixed = mix_teachers([first.bfloat16(), second.bfloat16()], [1.0, 3.0], temperature=2.0)

    torch.testing.assert_close((mixed / 2).softmax(-1), torch.tensor([[0.625, 0.375, 0.0]]))
    assert (first.softmax(-1) + second.softmax(-1)).isfinite().all()  # a mean of logits would be -inf there


def test_far_apart_logits_stay_finite_and_inputs_are_left_alone():
    first, second = torch.tensor([[120.0, 0.0]]), torch.tensor([[0.0, 300.0]])
    first.requires_grad_()

    mixed = mix_teachers([first, second], [1.0, 1.0])

    torch.testing.assert_close(mixed.softmax(-1), torch.tensor([[0.5, 0.5]]))
    assert not mixed.requires_grad and second.tolist() == [[0.0, 300.0]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "2 teachers have 1 weights"),
        ([1.0, -0.5], r"weights are \[1.0, -0.5\]"),
        ([0.0, 0.0], "one above 0"),
        ([1.0, float("nan")], "nan"),
        ([1.0, float("inf")], "inf"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        mix_teachers([torch.zeros(2, 5), torch.zeros(2, 5)], weights)


def test_no_teacher_and_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="one above 0"):
        mix_teachers([], [])
    with pytest.raises(ValueError, match=r"\(2, 5\), \(2, 6\)"):
        mix_teachers([torch.zeros(2, 5), torch.zeros(2, 6)], [1.0, 1.0])
