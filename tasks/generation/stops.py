"""Where an answer ends: at an end token, or where its text holds a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from tasks.text.sequences import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A token that is not of text, or half of a character, holds no byte of the stop text.
_MARGIN = 8


def up_to_end(ids: Sequence[int], ends: set[int]) -> tuple[list[int], bool]:
    """Returns the tokens up to and with the first that ends an answer, and whether there is one."""
    stop = next((index + 1 for index, token in enumerate(ids) if token in ends), None)
    return list(ids[:stop]), stop is not None


def up_to_stop(
    ids: Sequence[int], stop: Sequence[str], *, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], bool]:
    """Returns the tokens up to and with the one that completes a stop text, and whether there is one."""
    if stop and any(text in decode(tokenizer, ids) for text in stop):
        for length in range(1, len(ids) + 1):
            if ends_in_stop(ids[:length], stop, tokenizer=tokenizer):
                return list(ids[:length]), True
    return list(ids), False


def ends_in_stop(ids: Sequence[int], stop: Sequence[str], *, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a stop text is in the text of the last tokens, as many as it may be made of."""
    if not stop:
        return False
    # A token of text is at least one byte.
    longest = max(len(text.encode()) for text in stop)
    told = decode(tokenizer, ids[-longest - _MARGIN :])
    return any(text in told for text in stop)


class StopTexts(StoppingCriteria):
    """Ends each row whose answer holds a stop text, and remembers at how many tokens.

    The prompt's text is not looked at, and neither is what follows an end token.

    Args:
        prompt_width: The columns before the first token of the answers.
    """

    def __init__(
        self, stop: Sequence[str], *, tokenizer: PreTrainedTokenizerBase, prompt_width: int, num_rows: int
    ) -> None:
        self.stop, self.tokenizer, self.prompt_width = list(stop), tokenizer, prompt_width
        self.lengths: list[int | None] = [None] * num_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        rows = input_ids[:, self.prompt_width :].tolist()
        for index, ids in enumerate(rows):
            if self.lengths[index] is None and ends_in_stop(ids, self.stop, tokenizer=self.tokenizer):
                self.lengths[index] = len(ids)
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)
