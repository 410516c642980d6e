"""Answers to be scored, as token ids, as text, and with the columns of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.text.prompts import columns_of, repeat, texts_of
from tasks.text.sequences import Exchange, continuation
from trainer import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAILURES = (Exception, SystemExit)  # of a user's code; not an interrupt, which is the run's
_SHOWN = 160  # characters of a text in a message


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to be scored, B of them.

    Args:
        prompts: What was asked, as text.
        completions: What was answered, without special tokens.
        exchanges: Both as token ids.
        raw_prompts: As the rows have them: text, or messages.
        columns: The other columns of their rows.
    """

    prompts: list[str]
    completions: list[str]
    exchanges: list[Exchange]
    raw_prompts: list[Any]
    columns: Mapping[str, list[Any]]

    @classmethod
    def of(
        cls, batch: Batch, exchanges: list[Exchange], *, samples: int, tokenizer: PreTrainedTokenizerBase
    ) -> Answers:
        """Returns the answers to a batch of prompts, so many of each, side by side."""
        return cls(
            prompts=repeat(texts_of(batch), samples),
            completions=[continuation(tokenizer, one.prompt, one.answer) for one in exchanges],
            exchanges=exchanges,
            raw_prompts=repeat(batch["columns"]["prompt"], samples),
            columns={name: repeat(values, samples) for name, values in columns_of(batch).items()},
        )

    def __len__(self) -> int:
        return len(self.completions)

    def show(self, index: int) -> str:
        """Returns one of them in words."""
        where = f"(number {index + 1} of {len(self)})"
        return f"the answer {cut(repr(self.completions[index]))} to {cut(repr(self.prompts[index]))} {where}"


def words_of(value: object, tell: Callable[[Any], str] = repr) -> str:
    """Returns what a value says of itself, on one line and cut; of one that fails at that, its type."""
    try:
        return cut(" ".join(tell(value).split()))
    except FAILURES:
        return f"({type(value).__name__} that cannot be shown)"


def cut(text: str) -> str:
    """Returns a text, of a long one both ends."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
