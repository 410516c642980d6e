"""One tokenised example, before it becomes tensors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.task import IGNORED

Tokens = NDArray[np.int32]


@dataclass(kw_only=True)
class Example:
    """Token ids and labels of equal length; `position_ids` only in packed blocks, where 0 starts a document.

    `sources` only where rows have a source: of each token, its place in the list of sources.
    """

    input_ids: Tokens
    labels: Tokens
    position_ids: Tokens | None = None
    sources: Tokens | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_counted(self) -> int:
        """Labels that count: the first token is never predicted, since logits are shifted by one."""
        return int((self.labels[1:] != IGNORED).sum())

    def cut(self, start: int, stop: int) -> "Example":
        """Returns the tokens from start to stop, without positions."""
        sources = None if self.sources is None else self.sources[start:stop]
        return Example(input_ids=self.input_ids[start:stop], labels=self.labels[start:stop], sources=sources)
