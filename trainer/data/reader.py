"""How rows of another kind than text become examples: what `data.rows` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import Dataset

from trainer.data.rows import Row
from trainer.task import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowReader(Protocol):
    """Reads rows whose examples are no plain token sequence, such as pairs of answers.

    It may have a `noun`, such as "pairs": what the closing table calls the examples.
    """

    def prepare(self, row: Row) -> Row:
        """Returns a row in the form that `build` takes; raises ConfigError with what is wrong with it.

        Rows are split by their `document`, else by their `prompt`; see `split_rows`.
        """

    def build(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, block_size: int) -> Dataset[dict[str, Any]]:
        """Returns the examples of prepared rows, in their order.

        Args:
            block_size: Tokens of the longest example.
        """

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], Batch]:
        """Returns what makes a batch of examples."""
