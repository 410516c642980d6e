"""What writes answers, whatever runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.generation.options import GenerationOptions


@dataclass(kw_only=True)
class Written:
    """Answers, as token ids.

    Args:
        answers: One per prompt, up to and with the end token or the token that completes a stop text.
        is_ended: Whether an answer ended so, and was not cut for its length; of an empty prompt true.
    """

    answers: list[list[int]]
    is_ended: list[bool]


class Writer(Protocol):
    """Writes answers to prompts; every rank must call its methods, also with no prompt at all."""

    def write(
        self, prompts: Sequence[list[int]], *, seeds: Sequence[int] | None, options: GenerationOptions
    ) -> Written:
        """Returns an answer to each prompt; to an empty one [].

        Args:
            prompts: Token ids.
            seeds: One per prompt, as `row_seeds` makes them; None: the most likely token each time.
        """

    def update_weights(self) -> None:
        """Has what follows written by the model as it is now."""
