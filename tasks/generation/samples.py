"""Tables of what was written, to read beside the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer import MultiModelTrainer

NONE: Mapping[str, Sequence[object]] = MappingProxyType({})


def log_samples(
    trainer: MultiModelTrainer,
    name: str,
    *,
    prompts: Sequence[str],
    answers: Sequence[str],
    values: Mapping[str, Sequence[object]] = NONE,
    step: int | None = None,
    limit: int = 4,
) -> None:
    """Logs a table of prompts, answers and what was said of them; of rank 0, its first rows.

    Args:
        values: More columns, such as a reward each, one value per answer; numbers are shortened to four digits.
        step: Which global step, counted from 1, they are drawn for; None: the last one that was done.
        limit: The number of rows.
    """
    if not trainer.is_main or not answers:
        return
    columns = {"prompt": prompts, "answer": answers, **values}
    lengths = {column: len(cells) for column, cells in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the table {name} has columns of different lengths: {lengths}")
    rows = [[_shown(cell) for cell in row] for row in zip(*columns.values(), strict=True)][:limit]
    trainer.log_table(name, columns=list(columns), rows=rows, step=trainer.global_step if step is None else step)


def _shown(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
