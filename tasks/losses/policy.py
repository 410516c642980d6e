"""Policy gradients of sampled answers: advantages within groups, clipped importance ratios, estimates of a KL."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SURROGATES = ("clip", "cispo", "sapo", "vespo")
RATIOS = ("token", "sequence", "product")
NORMALISATIONS = ("grpo", "token", "dr_grpo", "luspo")
BASELINES = ("mean", "leave_one_out")
SCALES = ("group", "batch", "none")
EPSILON = 1e-4  # added to a standard deviation that divides rewards, as TRL does

_LEAST_WEIGHT = math.log(1e-8)  # of VESPO: logarithms of ratios are kept between it and _LARGEST
_LARGEST = 20.0


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Which answer each of N tokens belongs to.

    Args:
        rows: Of each token its answer, (N,).
        num_rows: Answers, of which some may have no token.
    """

    rows: Tensor
    num_rows: int

    @classmethod
    def of(cls, counted: Tensor) -> Tokens:
        """Returns those of the positions that count, (B, T-1) bool, in the order of `values[counted]`."""
        return cls(rows=counted.nonzero()[:, 0], num_rows=len(counted))

    def sums(self, values: Tensor) -> Tensor:
        """Returns the values (N,) summed by answer, (B,)."""
        return values.new_zeros(self.num_rows).index_add(0, self.rows, values)

    def lengths(self) -> Tensor:
        """Returns the tokens of each answer, (B,), at least 1, so that they may divide."""
        return torch.bincount(self.rows, minlength=self.num_rows).clamp(min=1)


# Estimates of KL(policy || reference) from tokens that the policy drew (Schulman, "Approximating KL divergence", 2020),
# with d = log policy - log reference. The means of k1 and k3 are the divergence, that of k2 is not; neither k2 nor k3
# is ever below 0.


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d, (N,)."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d² / 2, (N,); the mean of its gradient is that of the divergence of a token (arXiv:2506.09477)."""
    return (log_probs - reference).square() / 2


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns exp(-d) - 1 + d, (N,), the estimate of GRPO (arXiv:2402.03300, eq. 4)."""
    difference = reference - log_probs
    return difference.expm1() - difference


KL_ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What is minimised of answers that an older policy has drawn, with their advantages A.

    With r the importance ratio of the policy and the older one, each token's loss is one of

        clip    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), the first r cut to at most `max_ratio` (PPO,
                arXiv:1707.06347, eq. 7; with two bounds DAPO, arXiv:2503.14476, sec. 3.1; the cut, which ends the
                growth of the loss where A < 0, as in INTELLECT-2, arXiv:2505.07291)
        cispo   -min(r, 1 + clip_high) A log p, the factor without a gradient (arXiv:2506.13585, without a lower bound)
        sapo    -sigmoid(t (r - 1)) 4 / t A, t = sapo_positive where A > 0, else sapo_negative (arXiv:2511.20347)
        vespo   -w A log p, w = exp(l (1 - R)) R^k without a gradient, R the product of the answer's ratios
                (arXiv:2602.10693); k = 2, l = 3 where A >= 0, else k = 3, l = 2

    Args:
        ratio: "token"; "sequence": the geometric mean of the answer's (GSPO, arXiv:2507.18071, eq. 7); "product": of
            all of them, the ratio of the whole answer, as in RLOO (arXiv:2402.14740).
        normalisation: What the loss is a mean of: "grpo", each answer's mean over its tokens, then over the answers
            (arXiv:2402.03300, eq. 3); "token", all tokens (DAPO, sec. 3.3); "dr_grpo", answers of `max_length` tokens
            each (arXiv:2503.20783); "luspo", answers, each the sum of its tokens (arXiv:2602.05261).
        max_length: Tokens of the longest answer.
    """

    surrogate: str = "clip"
    ratio: str = "token"
    normalisation: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_ratio: float | None = None
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    max_length: int = 1

    @property
    def is_by_token(self) -> bool:
        """Whether a token's loss depends on no other token."""
        return self.ratio == "token" and self.surrogate != "vespo"

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, tokens: Tokens | None) -> PolicyTerms:
        """Returns the loss of each token, not yet weighted.

        Args:
            log_probs: Of the policy, (N,), with a graph.
            old: Of the policy that drew the tokens, (N,).
            advantages: (N,).
            tokens: May be None where `is_by_token`.
        """
        difference = log_probs - old
        log_ratio = difference
        if self.ratio != "token":
            assert tokens is not None
            sums = tokens.sums(difference)
            log_ratio = (sums / tokens.lengths() if self.ratio == "sequence" else sums)[tokens.rows]
        ratio = log_ratio.exp()
        is_low = (ratio < 1 - self.clip_low) & (advantages < 0)
        is_high = (ratio > 1 + self.clip_high) & (advantages > 0)
        if self.surrogate == "cispo":
            loss = -ratio.detach().clamp(max=1 + self.clip_high) * advantages * log_probs
            is_low = torch.zeros_like(is_low)
        elif self.surrogate == "sapo":
            sharpness = _by_sign(advantages > 0, self.sapo_positive, self.sapo_negative, like=ratio)
            loss = -torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantages
            is_low, is_high = torch.zeros_like(is_low), torch.zeros_like(is_high)
        elif self.surrogate == "vespo":
            assert tokens is not None
            loss = -_vespo_weights(difference.detach(), advantages, tokens) * advantages * log_probs
            is_low, is_high = torch.zeros_like(is_low), torch.zeros_like(is_high)
        else:
            clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
            free = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
            loss = -torch.minimum(free * advantages, clipped * advantages)
        return PolicyTerms(loss=loss, ratio=ratio.detach(), is_low=is_low, is_high=is_high)

    def weights(self, tokens: Tokens, *, like: Tensor) -> Tensor:
        """Returns what each token's loss is multiplied by in the sum that `items` divides, (N,).

        Args:
            like: Of its data type and on its device.
        """
        if self.normalisation != "grpo":
            return torch.ones(len(tokens.rows), dtype=like.dtype, device=like.device)
        return tokens.lengths().to(like.dtype).reciprocal()[tokens.rows]

    def items(self, counted: Tensor) -> Tensor:
        """Returns what the loss is a mean of, (): an answer without a token that counts is none.

        Args:
            counted: (B, T-1) bool.
        """
        if self.normalisation == "token":
            return counted.sum()
        answers = counted.any(-1).sum()
        return answers * self.max_length if self.normalisation == "dr_grpo" else answers


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """What `PolicyLoss` says of each token, (N,) each.

    Args:
        ratio: The importance ratio, without a graph.
        is_low: Whether the lower clip takes its gradient away.
        is_high: Whether the upper one does.
    """

    loss: Tensor
    ratio: Tensor
    is_low: Tensor
    is_high: Tensor


def _vespo_weights(difference: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
    sums = tokens.sums(difference.clamp(-_LARGEST, _LARGEST)).clamp(_LEAST_WEIGHT, _LARGEST)[tokens.rows]
    power, decay = (_by_sign(advantages >= 0, *pair, like=sums) for pair in ((2.0, 3.0), (3.0, 2.0)))
    return (decay + power * sums - decay * sums.exp()).exp()


def _by_sign(is_first: Tensor, first: float, second: float, *, like: Tensor) -> Tensor:
    return torch.where(is_first, torch.full_like(like, first), torch.full_like(like, second))


# Advantages -----------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, *, baseline: str, scale: str, deviation: Tensor | None = None) -> Tensor:
    """Returns the advantages of G answers to each prompt, (P, G): rewards less their baseline, and scaled.

    The mean is the baseline of GRPO (arXiv:2402.03300, sec. 4.1.2), the mean of the others that of RLOO
    (arXiv:2402.14740). A reward that is NaN does not exist: it is in no baseline, and its advantage is 0. So is
    that of the only reward of a prompt. All rewards of a prompt alike give advantages of exactly 0.
    Computed in float64: in float32 the squares of 2e19 are infinite, and all advantages would be 0.

    Args:
        rewards: (P, G), float.
        scale: "group": divided by the standard deviation of the prompt's rewards (with G - 1) plus EPSILON; "batch": by
            `deviation` plus EPSILON; "none" (arXiv:2503.20783).
        deviation: Of all rewards of the batch, (); see `batch_deviation`.
    """
    values, exists = rewards.double(), ~rewards.isnan()
    count = exists.sum(-1, keepdim=True)
    # Of rewards that are all alike exactly 0, whatever their sum is rounded to.
    values = (values - values.nan_to_num(nan=-math.inf).amax(-1, keepdim=True)).masked_fill(~exists, 0)
    mean = values.sum(-1, keepdim=True) / count.clamp(min=1)
    centred = (values - mean) * exists
    found = centred * (count / (count - 1).clamp(min=1)) if baseline == "leave_one_out" else centred
    if scale == "group":
        spread = (centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        found = found / (spread + EPSILON)
    elif scale == "batch":
        assert deviation is not None
        found = found / (deviation.to(found) + EPSILON)
    return found.masked_fill(~(exists & (count > 1)), 0).to(torch.promote_types(rewards.dtype, torch.float32))


def batch_deviation(rewards: Tensor, total: Callable[[Tensor], Tensor] = lambda value: value) -> Tensor:
    """Returns the standard deviation of all rewards that are not NaN, () float64, with one less than their number.

    Args:
        total: Sums over all ranks; every rank must call it.
    """
    values = rewards[~rewards.isnan()].double()
    count, summed = total(torch.stack([values.new_tensor(len(values)), values.sum()]))
    mean = summed / count.clamp(min=1)
    squares: Tensor = total((values - mean).square().sum())
    deviation: Tensor = (squares / (count - 1).clamp(min=1)).sqrt()
    return deviation
