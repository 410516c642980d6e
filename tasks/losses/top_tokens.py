"""A teacher's distribution as its most likely tokens and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    ids: Tensor
    log_probs: Tensor
    log_normalisers: Mapping[float, Tensor]

    def __getitem__(self, rows: slice | Tensor) -> TopTokens:
        return TopTokens(
            ids=self.ids[rows],
            log_probs=self.log_probs[rows],
            log_normalisers={temperature: values[rows] for temperature, values in self.log_normalisers.items()},
        )

    def __len__(self) -> int:
        return len(self.ids)
