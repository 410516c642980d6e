"""Advantages, whitening, the critic's loss and the KL coefficient, against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import tasks.losses.advantages
from tasks.losses.advantages import KLController, clipped_value_loss, explained_variance, gae, moments, whiten


def table(rows: int, columns: int, *, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# Answers of 4, 0, 1 and 6 tokens after prompts of different lengths, padded on the right.
COUNTED = torch.zeros(4, 9, dtype=torch.bool)
COUNTED[0, 2:6] = COUNTED[2, 5:6] = COUNTED[3, 3:9] = True


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0), (1.0, 1.0), (0.5, 0.3)])
def test_advantages_are_the_discounted_sums_of_the_critics_errors(gamma: float, lam: float) -> None:
    rewards, values = table(4, 9, seed=0), table(4, 9, seed=1)

    advantages = gae(rewards, values, COUNTED, gamma=gamma, lam=lam)

    expected = np.zeros((4, 9))
    for row in range(4):
        steps = COUNTED[row].nonzero().flatten().tolist()
        r = rewards[row, steps].double().numpy()
        v = np.append(values[row, steps].double().numpy(), 0.0)  # nothing comes after the last token
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(steps))]
        for t, column in enumerate(steps):
            expected[row, column] = sum((gamma * lam) ** k * delta[t + k] for k in range(len(steps) - t))
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-5)


def test_at_lam_1_the_returns_are_the_rewards_to_come() -> None:
    rewards, values = table(4, 9, seed=0), table(4, 9, seed=1)

    returns = gae(rewards, values, COUNTED, gamma=1.0, lam=1.0) + values

    for row, column in COUNTED.nonzero().tolist():
        to_come = rewards[row, column:][COUNTED[row, column:]].double().sum()
        assert returns[row, column].item() == pytest.approx(to_come.item(), abs=1e-5)


def test_what_stands_between_or_beside_counted_tokens_changes_nothing() -> None:
    rewards, values = table(1, 9, seed=0), table(1, 9, seed=1)
    apart, close = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0]]).bool(), torch.tensor([[1, 1, 1, 1]]).bool()
    junk = torch.where(apart, 0.0, math.nan)

    found = gae(rewards + junk, values + junk, apart, gamma=0.9, lam=0.8)

    expected = gae(rewards[:, apart[0]], values[:, apart[0]], close, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found[apart], expected[0])
    assert found[~apart].abs().sum() == 0


def cut(values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(values.split(list(sizes)))


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_whitening_does_not_depend_on_micro_batches(sizes: list[int]) -> None:
    values = table(4, 9, seed=2) * 3 + 100
    numbers = values[COUNTED].double().numpy()

    found = torch.cat(whiten(cut(values, sizes), cut(COUNTED, sizes), is_filler=[False] * len(sizes)))

    expected = (numbers - numbers.mean()) / np.sqrt(np.mean((numbers - numbers.mean()) ** 2))
    np.testing.assert_allclose(found[COUNTED].numpy(), expected, atol=1e-5)
    assert found[~COUNTED].abs().sum() == 0
    # torch's default variance has one number less below; the ratio is the documented one.
    other = (values[COUNTED] - values[COUNTED].mean()) / values[COUNTED].std()
    ratio = (other / found[COUNTED]).mean().item()
    assert ratio == pytest.approx(math.sqrt(1 - 1 / len(numbers)), abs=1e-4)


def test_a_filler_is_whitened_with_the_others_and_counts_for_nothing() -> None:
    values, counted = cut(table(4, 9, seed=2), [2, 2]), cut(COUNTED, [2, 2])

    (alone,) = whiten(values[:1], counted[:1], is_filler=[False])
    first, filler = whiten([values[0], values[1] * 1000], counted, is_filler=[False, True])

    torch.testing.assert_close(first, alone)
    assert filler[counted[1]].abs().max() > 100


def test_numbers_of_other_ranks_count() -> None:
    values, counted = table(4, 9, seed=2), COUNTED
    numbers = values[counted].double()
    halves = [values[:2][counted[:2]].double(), values[2:][counted[2:]].double()]
    sums = iter(
        [
            torch.tensor([halves[1].sum(), len(halves[1])], dtype=torch.float64),
            (halves[1] - numbers.mean()).square().sum(),
        ]
    )

    with mock.patch.object(tasks.losses.advantages, "sum_over_ranks", lambda mine: mine + next(sums)):
        (found,) = whiten([values[:2]], [counted[:2]], is_filler=[False])

    expected = (halves[0] - numbers.mean()) / numbers.std(correction=0)
    torch.testing.assert_close(found[counted[:2]].double(), expected, atol=1e-5, rtol=0)


def test_numbers_whose_squares_no_float32_holds_are_whitened() -> None:
    values = table(4, 9, seed=2)

    (plain,) = whiten([values], [COUNTED], is_filler=[False])
    (found,) = whiten([values * 1e25], [COUNTED], is_filler=[False])

    torch.testing.assert_close(found, plain)
    assert math.isfinite(moments([values * 1e37]).variance)


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_or_one_is_whitened_to_zero(count: int) -> None:
    counted = torch.zeros(1, 3, dtype=torch.bool)
    counted[0, :count] = True

    (found,) = whiten([torch.full((1, 3), 7.0)], [counted], is_filler=[False])

    assert found.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("clip", [0.2, 0.05, None])
def test_value_loss_and_its_gradient(clip: float | None) -> None:
    old, returns = table(1, 60, seed=3)[0], table(1, 60, seed=4)[0]
    values = (old + 0.3 * table(1, 60, seed=5)[0]).requires_grad_()

    losses, is_clipped = clipped_value_loss(values, old_values=old, returns=returns, clip=clip)
    losses.sum().backward()

    assert values.grad is not None
    expected, slopes, clipped = [], [], []
    numbers = (values.detach().double().tolist(), old.double().tolist(), returns.double().tolist())
    for v, o, r in zip(*numbers, strict=True):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        expected.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        clipped.append((near - r) ** 2 > (v - r) ** 2)
        slopes.append(0.0 if clipped[-1] else v - r)
    assert clip is None or 5 < sum(clipped) < 55
    torch.testing.assert_close(losses.detach().double(), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(values.grad.double(), torch.tensor(slopes, dtype=torch.float64))
    assert is_clipped.tolist() == clipped


def test_explained_variance() -> None:
    returns = table(1, 50, seed=6)[0]

    def explained(values: Tensor) -> float:
        return explained_variance(moments([returns]), moments([returns - values]))

    assert explained(returns) == 1
    assert explained(torch.full_like(returns, 3.0)) == pytest.approx(0, abs=1e-6)
    assert explained(-returns) == pytest.approx(-3, abs=1e-5)
    assert explained_variance(moments([torch.ones(3)]), moments([torch.ones(3)])) == 0


def test_kl_coefficient_follows_its_target() -> None:
    adaptive, fixed = KLController(target=6.0), KLController(target=None)

    # arXiv:1909.08593, sec. 2.2, with K = 0.1: the error is clipped at 20 %.
    assert adaptive.after(0.2, kl=6.0) == pytest.approx(0.2)
    assert adaptive.after(0.2, kl=6.6) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert adaptive.after(0.2, kl=600.0) == pytest.approx(0.2 * 1.02)
    assert adaptive.after(0.2, kl=-1.0) == pytest.approx(0.2 * 0.98)
    assert fixed.after(0.2, kl=600.0) == 0.2
