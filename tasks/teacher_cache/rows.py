"""What a cache knows an example by: a digest of its real tokens, whatever batch they stand in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.text.language import MASKS, next_tokens, real_tokens
from trainer import Batch, TrainingData

DIGEST_BYTES = 16
Digests = np.ndarray[Any, np.dtype[np.bytes_]]  # (rows,) of "S16"


@dataclass(kw_only=True, frozen=True)
class Rows:
    """The rows of a batch as a cache sees them.

    Args:
        digests: One for each row, (B,).
        kept: Which positions have an entry, (B, T-1) bool on the CPU.
    """

    digests: Digests
    kept: Tensor


def describe_rows(batch: Batch, *, mask: str) -> Rows:
    """Returns the digests of a batch's rows and the positions that a cache holds of them.

    A digest covers the real tokens, their labels and their positions: padding, the place in the batch and the order
    of the data change nothing, while another document before the tokens in a packed row does.

    Args:
        mask: "completion", "prompt" or "all": of which positions there is an entry.
    """
    batch = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}
    tokens, labels = batch["input_ids"], batch["labels"]
    real = real_tokens(batch)
    counts = real.cumsum(-1) - 1
    positions = batch.get("position_ids", counts)
    table = torch.stack([tokens, labels, positions.expand_as(tokens)], -1).to(torch.int32)  # (B, T, 3)
    digests = [_digest(row[is_real].numpy().tobytes()) for row, is_real in zip(table, real, strict=True)]
    return Rows(digests=np.array(digests, dtype=f"S{DIGEST_BYTES}"), kept=MASKS[mask](batch))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@dataclass(kw_only=True, frozen=True)
class Example:
    """One example of a run: where it lies, and what a cache knows of it.

    Args:
        largest: Id of a right next token among the positions that have an entry.
    """

    source: str
    part: str
    index: int
    digest: bytes
    num_kept: int
    largest: int


def describe_examples(
    sources: Mapping[str, TrainingData], *, mask: str, rank: int, world_size: int
) -> Iterator[Example]:
    """Yields this rank's share of all examples, train before validation, those without an entry left out."""
    for name, part, indices in shares(sources, rank=rank, world_size=world_size):
        batch = sources[name].collated(part, indices)
        rows = describe_rows(batch, mask=mask)
        counts = rows.kept.sum(-1).tolist()
        tokens = next_tokens(batch, rows.kept.to(batch["labels"].device))
        digests, begun = rows.digests.tobytes(), 0
        for row, (index, count) in enumerate(zip(indices, counts, strict=True)):
            digest = digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            if count:
                largest = int(tokens[begun : begun + count].max())
                yield Example(source=name, part=part, index=index, digest=digest, num_kept=count, largest=largest)
            begun += count


def shares(sources: Mapping[str, TrainingData], *, rank: int, world_size: int) -> Iterator[tuple[str, str, range]]:
    """Yields this rank's share of all examples, a batch at a time: the set's name, its part, and the indices there."""
    for name, source in sources.items():
        for part, dataset in source.parts.items():
            size, num_examples = source.batch_size, len(dataset)  # type: ignore[arg-type]
            for start in range(rank * size, num_examples, world_size * size):
                yield name, part, range(start, min(start + size, num_examples))
