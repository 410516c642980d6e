"""Answers that a model wrote to prompts, as a batch to train on, and what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.generation import Written
from tasks.rewards import Answers, Rewards, means
from tasks.text.prompts import prompts_of
from tasks.text.sequences import Exchange, join, pad_token
from trainer import IGNORED, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the actor wrote to B prompts, and what it is worth.

    Args:
        batch: Prompts and answers as token ids, see `tasks.text.sequences.join`; an answer without any reward has no
            label.
        components: Of the score, not weighted, (B, R); NaN where one does not apply.
        scores: (B,), NaN where none applies.
    """

    batch: Batch
    answers: Answers
    is_ended: Tensor
    components: Tensor
    scores: Tensor

    def metrics(self, names: Sequence[str], *, model: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns what is told of the answers, by name, as sums and counts, () each.

        Args:
            names: Of the components.
            model: That wrote them.
        """
        lengths = self.scores.new_tensor([len(one.answer) for one in self.answers.exchanges])
        measured = torch.stack([self.scores, lengths, self.is_ended.float()], dim=1)
        found = means(measured, ["reward", "answer_tokens", "ended"])
        parts = {f"reward/{name}": pair for name, pair in means(self.components, names).items()}
        # The parts stand below their sum, as in the closing table.
        return {f"{model}/{name}": pair for name, pair in {"reward": found["reward"], **parts, **found}.items()}

    def rows(self) -> list[list[str]]:
        """Returns the prompt, the answer and its score of each, as text."""
        answers, scores = self.answers, self.scores.tolist()
        return [
            [prompt, text, f"{value:.4g}"]
            for prompt, text, value in zip(answers.prompts, answers.completions, scores, strict=True)
        ]


@torch.no_grad()
def score_answers(
    batch: Batch,
    written: Written,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rewards: Rewards,
    missing_end_penalty: float,
    device: torch.device,
) -> Rollout:
    """Returns one answer to each prompt of a batch, and what it is worth; every rank must call it.

    Args:
        tokenizer: Of prompts and answers.
        missing_end_penalty: Taken from the score of an answer that was cut.
    """
    exchanges = [
        Exchange(prompt=prompt, answer=answer, column=len(prompt))
        for prompt, answer in zip(prompts_of(batch), written.answers, strict=True)
    ]
    answers = Answers.of(batch, exchanges, samples=1, tokenizer=tokenizer)
    values = rewards.score(answers, device=device)  # (B, R)
    is_ended = torch.tensor(written.is_ended, device=device)
    scores = rewards.total(values, answers) - missing_end_penalty * ~is_ended
    joined = join(exchanges, pad_id=pad_token(tokenizer), device=device)
    joined["labels"] = joined["labels"].masked_fill(scores.isnan().unsqueeze(-1), IGNORED)
    return Rollout(batch=joined, answers=answers, is_ended=is_ended, scores=scores, components=values)
