"""A teacher's distribution as its most likely tokens and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True, frozen=True)
class TopTokens:
    """The teacher's K most likely tokens after each of N positions.

    At temperature T the probability of token k is exp(log_probs_k / T - log_normalisers[T]); the mass of all other
    tokens together is the tail.

    Args:
        ids: (N, K) int64, no id twice in a row.
        log_probs: At temperature 1, (N, K) float32.
        log_normalisers: Temperature to log sum over the whole vocabulary of p_v^(1/T), (N,) float32; at 1 it is 0.
        log_tails: Temperature to log of the tail's mass, (N,) float32, where it is known; see `tail_at`.
    """

    ids: Tensor
    log_probs: Tensor
    log_normalisers: Mapping[float, Tensor]
    log_tails: Mapping[float, Tensor] = field(default_factory=dict)

    @classmethod
    def from_logits(cls, logits: Tensor, *, k: int, temperatures: Sequence[float] = (1.0,)) -> TopTokens:
        """Returns the k most likely tokens of logits (N, V), sorted, usable at these temperatures."""
        if not 1 <= k <= logits.shape[-1]:
            raise ValueError(f"k is {k}; logits {tuple(logits.shape)} have 1 to {logits.shape[-1]} tokens to keep")
        log_p = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
        log_probs, ids = log_p.topk(k, -1)
        rest = log_p.scatter(-1, ids, -torch.inf)
        normalisers, tails = {}, {}
        for temperature in map(float, temperatures):
            normaliser = (log_p / temperature).logsumexp(-1) if temperature != 1 else torch.zeros_like(log_p[..., 0])
            normalisers[temperature] = normaliser
            tails[temperature] = (rest / temperature).logsumexp(-1) - normaliser
        return cls(ids=ids, log_probs=log_probs, log_normalisers=normalisers, log_tails=tails)

    def at(self, temperature: float) -> Tensor:
        """Returns the tokens' log-probabilities at that temperature, (N, K); refused if its normaliser is missing.

        Dividing alone would renormalise over the K tokens: the 64 most likely of a language model may have half of
        the mass at temperature 1 and a twentieth at 2, and softmax(log_probs / 2) gives them all of it.
        """
        if temperature == 1:
            return self.log_probs
        if temperature not in self.log_normalisers:
            present = ", ".join(str(value) for value in sorted({1.0, *self.log_normalisers}))
            raise ValueError(
                f"the teacher's top tokens have no normaliser for temperature {temperature}, only for {present}; "
                "use one of these, or store this one too"
            )
        return self.log_probs / temperature - self.log_normalisers[temperature].unsqueeze(-1)

    def tail_at(self, temperature: float) -> Tensor:
        """Returns the log of the mass of all other tokens at that temperature, (N,).

        Where it is not stored, it is that of 1 - the tokens' sum, which is noise for a tail below 1e-6 (below 1e-3, if
        the log-probabilities come from a half-precision file): good enough for the forward KL, where the tail counts by
        its mass, not for the reverse KL, where it counts by its log. At least float32's resolution: with log 0, any
        student's reverse KL would be infinite where the teacher is sure.
        """
        if temperature in self.log_tails:
            return self.log_tails[temperature]
        rest = 1 - self.at(temperature).exp().sum(-1)
        return rest.clamp_min_(torch.finfo(torch.float32).eps).log_()

    def check(self, vocabulary: int) -> None:
        """Raises one ValueError with all that makes this no part of a distribution over so many tokens."""
        problems = []
        rows = tuple(self.ids.shape[:1])
        if self.ids.ndim != 2 or self.ids.dtype != torch.int64:
            problems.append(f"ids are {tuple(self.ids.shape)} {self.ids.dtype}, not (N, K) int64")
        elif self.ids.numel():
            low, high = int(self.ids.min()), int(self.ids.max())
            if low < 0 or high >= vocabulary:
                problems.append(f"ids go from {low} to {high}, the vocabulary has {vocabulary} tokens")
            in_order = self.ids.sort(-1).values
            twice = int((in_order[:, 1:] == in_order[:, :-1]).any(-1).sum())
            if twice:
                problems.append(f"{twice} of {len(self)} positions have an id twice")
        if self.log_probs.shape != self.ids.shape or self.log_probs.dtype != torch.float32:
            problems.append(
                f"log_probs are {tuple(self.log_probs.shape)} {self.log_probs.dtype}, "
                f"not {tuple(self.ids.shape)} float32"
            )
        elif self.log_probs.numel():
            # A half-precision file rounds each log-probability by up to 5e-4 of itself.
            most = self.log_probs.exp().sum(-1).max().item()
            if not most <= 1.001:
                problems.append(f"the tokens of a position have a mass of {most:.4g}, more than 1")
        for name, by_temperature in (("log_normalisers", self.log_normalisers), ("log_tails", self.log_tails)):
            for temperature, values in by_temperature.items():
                if tuple(values.shape) != rows:
                    problems.append(f"{name}[{temperature}] is {tuple(values.shape)}, not {rows}")
        if problems:
            raise ValueError("the teacher's top tokens are no distribution: " + "; ".join(problems))

    def __getitem__(self, rows: slice | Tensor) -> TopTokens:
        return TopTokens(
            ids=self.ids[rows],
            log_probs=self.log_probs[rows],
            log_normalisers={temperature: values[rows] for temperature, values in self.log_normalisers.items()},
            log_tails={temperature: values[rows] for temperature, values in self.log_tails.items()},
        )

    def __len__(self) -> int:
        return len(self.ids)
