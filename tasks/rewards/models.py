"""Rewards by a frozen model, which may have a tokenizer of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.rewards.answers import Answers
from tasks.scores.scoring import sequence_scores
from tasks.text.sequences import Exchange, encode_prompt, join, pad_token, read_alike
from trainer import ModelHandle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelScorer:
    """Scores answers by a reward model, at their last token.

    Where the model reads by another tokenizer, it is given the prompt's messages in its own chat template, and the
    answer's text, with its own end token where the answer ended by one.

    Args:
        source: The tokenizer of the answers.
        target: The model's.
        ends: The ids that end an answer.
    """

    def __init__(
        self,
        model: ModelHandle,
        *,
        source: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
        ends: set[int],
        device: torch.device,
    ) -> None:
        self.model, self.source, self.target, self.ends, self.device = model, source, target, ends, device
        self.is_same = read_alike(source, target)

    def __call__(self, answers: Answers) -> Tensor:
        """Returns the rewards, (B,) float32."""
        exchanges = answers.exchanges
        if not self.is_same:
            exchanges = [
                self._tell(exchange, prompt=prompt, answer=answer)
                for exchange, prompt, answer in zip(exchanges, answers.raw_prompts, answers.completions, strict=True)
            ]
        with torch.no_grad():
            return sequence_scores(self.model, join(exchanges, pad_id=pad_token(self.target), device=self.device))

    def _tell(self, exchange: Exchange, *, prompt: Any, answer: str) -> Exchange:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = encode_prompt(messages, self.target)
        told = [int(token) for token in self.target(answer, add_special_tokens=False, verbose=False)["input_ids"]]
        end = self.target.eos_token_id
        if exchange.answer and exchange.answer[-1] in self.ends and end is not None:
            told.append(int(end))
        return Exchange(prompt=asked, answer=told, column=len(asked))
