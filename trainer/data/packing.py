"""Packs examples into blocks; positions restart at each document, which is what keeps attention inside it."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import numpy as np

from trainer.data.example import Example
from trainer.task import IGNORED


def chunk(example: Example, block_size: int) -> Iterator[Example]:
    """Yields pieces of at most block_size tokens.

    A piece starts with the last token of the one before: its first token has no prediction, so that without the overlap
    one label per block would be lost; with it every token but the text's first is predicted exactly once.
    """
    start = 0
    while start == 0 or start < len(example) - 1:
        yield example.cut(start, start + block_size)
        start += block_size - 1


def pack(examples: Iterable[Example], block_size: int) -> list[Example]:
    """Returns blocks of at most block_size tokens, each example whole in one of them (best fit, longest first)."""
    blocks: list[list[Example]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, index of the block), ascending
    for example in sorted(examples, key=len, reverse=True):
        place = bisect_left(spaces, (len(example), -1))
        if place < len(spaces):
            free, index = spaces.pop(place)
        else:
            free, index = block_size, len(blocks)
            blocks.append([])
        blocks[index].append(example)
        insort(spaces, (free - len(example), index))
    return [_join(block) for block in blocks]


def _join(examples: list[Example]) -> Example:
    labels = [example.labels.copy() for example in examples]
    for document in labels:
        document[0] = IGNORED  # the last token of the document before must not predict it
    sources = [example.sources for example in examples if example.sources is not None]
    return Example(
        input_ids=np.concatenate([example.input_ids for example in examples]),
        labels=np.concatenate(labels),
        position_ids=np.concatenate([np.arange(len(example), dtype=np.int32) for example in examples]),
        sources=np.concatenate(sources) if sources else None,  # of all rows or of none
    )
