"""Deduplication and the seeded split by document, before anything is tokenised or packed."""

import json
import logging
import random
from collections import defaultdict

from trainer.config import ConfigError
from trainer.data.rows import Row, prompt_of

log = logging.getLogger(__name__)


def split_rows(rows: list[Row], *, fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns training and validation rows; exact duplicates are dropped, and no document is on both sides.

    A row's document is its `document` column, else its prompt (first user message) or text without regard to case and
    white space. Whole documents go to validation, in an order that only the seed decides, until `fraction` of the rows
    is there; both sides keep the order of `rows`.
    """
    rows = deduplicate(rows)
    documents: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        documents[_document(row)].append(index)
    if len(documents) < 2:
        raise ConfigError(
            f"{len(documents)} document(s) or prompt(s) cannot be split into training and validation, at least 2 are "
            "needed; give a validation set, or separate documents by blank lines or a `document` column"
        )
    held_out = _choose(list(documents.values()), num_rows=max(1, round(fraction * len(rows))), seed=seed)
    train = [row for index, row in enumerate(rows) if index not in held_out]
    validation = [row for index, row in enumerate(rows) if index in held_out]
    log.info(
        "split %d rows of %d documents or prompts: %d to train on, %d to validate on",
        len(rows),
        len(documents),
        len(train),
        len(validation),
    )
    return train, validation


def deduplicate(rows: list[Row]) -> list[Row]:
    """Returns the rows without exact repetitions, first ones kept, and reports how many were dropped."""
    unique: dict[str, Row] = {}
    for row in rows:
        unique.setdefault(json.dumps(row, sort_keys=True, default=str), row)
    if len(unique) < len(rows):
        log.info("dropped %d duplicates of %d rows", len(rows) - len(unique), len(rows))
    return list(unique.values())


def _document(row: Row) -> str:
    if "document" in row:
        return f"document {row['document']}"
    text = prompt_of(row)
    if text is None:
        text = row["text"] if "text" in row else json.dumps(row, sort_keys=True, default=str)
    return " ".join(text.casefold().split())


def _choose(documents: list[list[int]], *, num_rows: int, seed: int) -> set[int]:
    """Returns the rows of whole documents, at least `num_rows` of them, never those of all documents."""
    random.Random(seed).shuffle(documents)
    chosen: set[int] = set()
    for document in documents[:-1]:
        if len(chosen) >= num_rows:
            break
        chosen.update(document)
    return chosen
