"""What PPO learns from: advantages and returns of answers, the critic's loss, and a KL coefficient that adapts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import sum_over_ranks


def gae(rewards: Tensor, values: Tensor, counted: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Returns the generalised advantage of each counted token, (B, T-1); 0 elsewhere.

    A_t = delta_t + gamma * lam * A_{t+1} with delta_t = r_t + gamma * V_{t+1} - V_t (arXiv:1506.02438, eq. 11 and 16).
    After the last counted token of a row nothing comes: V and A are 0 there, also where an answer was cut. What stands
    at positions that do not count is skipped, whatever it is.

    Args:
        rewards: Of writing the token after each position, (B, T-1).
        values: The critic's value of the text up to each position, (B, T-1).
        counted: Which positions do, (B, T-1) bool.
        gamma: The discount per token.
        lam: 0: one step of the critic's; 1: all rewards that followed.
    """
    advantages = torch.zeros_like(values)
    following_value = values.new_zeros(len(values))
    following = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        is_counted = counted[:, step]
        delta = rewards[:, step] + gamma * following_value - values[:, step]
        following = torch.where(is_counted, delta + gamma * lam * following, following)
        following_value = torch.where(is_counted, values[:, step], following_value)
        advantages[:, step] = torch.where(is_counted, following, 0.0)
    return advantages


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and variance of numbers over micro-batches and ranks.

    Args:
        variance: The biased one, divided by the count.
    """

    count: float
    mean: float
    variance: float


def moments(values: Sequence[Tensor]) -> Moments:
    """Returns the moments of all numbers of all ranks, by two sums in float64; every rank must call it.

    The second sum is that of squared distances to the mean: sums of squares would lose what is small beside it.

    Args:
        values: Any shapes; of fillers, nothing.
    """
    sums = [torch.stack([value.double().sum(), value.new_tensor(value.numel()).double()]) for value in values]
    total, count = sum_over_ranks(torch.stack(sums).sum(0)).tolist()
    mean = total / count if count else 0.0
    squares = sum_over_ranks(torch.stack([(value.double() - mean).square().sum() for value in values]).sum())
    return Moments(count=count, mean=mean, variance=float(squares) / count if count else 0.0)


def whiten(values: Sequence[Tensor], counted: Sequence[Tensor], *, is_filler: Sequence[bool]) -> list[Tensor]:
    """Returns the counted numbers of a window with mean 0 and variance 1 over all micro-batches and ranks, 0 elsewhere.

    The variance is the biased one, and 1e-8 is added to it; dividing by one number less than there are would make the
    result smaller by sqrt(1 - 1/n). Fillers are left out of both moments, and whitened with them. Every rank must call
    it.

    Args:
        values: Of each micro-batch, (B, T-1).
        counted: The same shapes, bool.
        is_filler: Which micro-batches count for nothing.
    """
    real = [
        value[mask] if not filler else value[:0].flatten()
        for value, mask, filler in zip(values, counted, is_filler, strict=True)
    ]
    found = moments(real)
    scale = (found.variance + 1e-8) ** -0.5
    return [
        torch.where(mask, (value.double() - found.mean) * scale, 0.0).to(value.dtype)
        for value, mask in zip(values, counted, strict=True)
    ]


def clipped_value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the critic's loss per token and where the clipped value is what it costs, both (N,).

    1/2 * max((V - R)^2, (V_clip - R)^2) with V_clip = V_old + clamp(V - V_old, -clip, clip): a value may leave the
    neighbourhood of the old one only at the price of no gradient, as in OpenAI's PPO2 and in learning from human
    feedback after it (arXiv:2203.02155). None of it is in the paper of PPO (arXiv:1707.06347, eq. 9).

    Args:
        values: The critic's, with a graph.
        old_values: Of the critic that the answers were scored by.
        returns: Old advantages plus old values.
        clip: In the units of the values; None: 1/2 * (V - R)^2.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns).square()
    return torch.maximum(errors, clipped) / 2, (clipped > errors).detach()


def explained_variance(returns: Moments, errors: Moments) -> float:
    """Returns 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant, below for worse."""
    return 1 - errors.variance / returns.variance if returns.variance > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class KLController:
    """How the weight of the KL to the reference goes on from one rollout to the next.

    Args:
        target: The KL per answer that is aimed at, in nats; None: the coefficient stays.
        gain: How fast the coefficient follows.
    """

    target: float | None
    gain: float = 0.1

    def after(self, coefficient: float, *, kl: float) -> float:
        """Returns the next coefficient, given the mean KL of a rollout's answers.

        coefficient * (1 + gain * clamp(kl / target - 1, -0.2, 0.2)) (arXiv:1909.08593, sec. 2.2).
        """
        if self.target is None:
            return coefficient
        return coefficient * (1 + self.gain * min(max(kl / self.target - 1, -0.2), 0.2))
