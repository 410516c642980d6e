"""One micro-batch of a policy gradient: the loss of a model's answers, and what is watched of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head, HeadTap
from tasks.logits.log_probs import Reading, TokenLogProbs, log_probs_of_logits, token_log_probs
from tasks.losses.policy import KL_ESTIMATES, PolicyLoss, Tokens, k3
from tasks.policy.options import KlOptions
from tasks.text.language import next_tokens
from trainer import Batch, ModelHandle

WATCHED = ("kl", "entropy", "clipped", "clipped_low", "clipped_high", "moved")


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """The loss of N tokens that a policy drew, from what is known of them.

    Args:
        old: log p of the policy that drew them, (N,); None: it is the one that is trained.
        advantages: (N,).
        reference: log p of the reference, (N,); None: there is none.
        temperature: At which they were drawn.
    """

    loss: PolicyLoss
    kl: KlOptions
    old: Tensor | None
    advantages: Tensor
    reference: Tensor | None
    tokens: Tokens
    temperature: float

    def run(
        self, model: ModelHandle, batch: Batch, counted: Tensor, *, tap: HeadTap | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum that `PolicyLoss.items` divides, (), and the sums over tokens of what is watched.

        Args:
            counted: Which positions hold those tokens, (B, T-1) bool.
            tap: The model's head, whose logits are then made a tile at a time; and once only, where a token's loss
                depends on no other token.
        """
        if tap is None or not self.loss.is_by_token:
            found = token_log_probs(model, batch, counted, temperature=self.temperature, tap=tap, entropy=True)
            total, sums = self._sum(found, slice(None), self._weights(found.log_probs))
        else:
            total, sums = self._by_tile(tap, batch, counted)
        watched = dict(zip(WATCHED, sums.unbind(), strict=True))
        if self.reference is None:
            del watched["kl"]
        return total, watched

    def _by_tile(self, tap: HeadTap, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        labels = next_tokens(batch, counted)
        reading = Reading(temperature=self.temperature, entropy=True)
        weights = self._weights(self.advantages)

        def of_tile(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            # A copy where the cap's own gradient needs the logits, which `log_probs_of_logits` writes over.
            given = logits if tap.softcap is None else logits.clone()
            return self._sum(log_probs_of_logits(given, labels[rows], reading), rows, weights)

        def compute(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
            return fused_loss(hidden, head, of_tile)

        found: tuple[Tensor, Tensor] = tap.run(batch, counted, compute)["head"]
        return found

    def _weights(self, like: Tensor) -> Tensor:
        return self.loss.weights(self.tokens, like=like)

    def _sum(self, found: TokenLogProbs, rows: slice, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted loss of some of the tokens, (), and the sums of WATCHED, (6,)."""
        log_probs, entropy = found.log_probs, found.entropy
        assert entropy is not None
        old = log_probs.detach() if self.old is None else self.old[rows]
        terms = self.loss(log_probs, old, self.advantages[rows], self.tokens)
        values, apart = terms.loss, torch.zeros_like(log_probs.detach())
        if self.reference is not None:
            divergence = KL_ESTIMATES[self.kl.estimator](log_probs, self.reference[rows])
            apart = divergence.detach()
            if self.kl.weight > 0 and self.kl.place == "loss":
                values = values + self.kl.weight * divergence
        watched = (
            apart,
            entropy.detach(),
            terms.is_low | terms.is_high,
            terms.is_low,
            terms.is_high,
            k3(old, log_probs.detach()),
        )
        return (values * weights[rows]).sum(), torch.stack([value.to(apart).sum() for value in watched])
