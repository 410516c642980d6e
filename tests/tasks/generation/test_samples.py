"""Tables of what was written."""

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.generation import log_samples


def trainer(*, is_main: bool = True) -> Any:
    tables: list[Any] = []
    log_table = lambda name, **table: tables.append((name, table))  # noqa: E731
    return SimpleNamespace(is_main=is_main, global_step=3, tables=tables, log_table=log_table)


def test_rows_hold_prompt_answer_and_values() -> None:
    one = trainer()

    log_samples(
        one, "samples", prompts=["a", "b", "c"], answers=["x", "y", "z"], values={"reward": [1 / 3, 0.0, 2]}, limit=2
    )

    ((name, table),) = one.tables
    assert (name, table["step"]) == ("samples", 3)
    assert table["columns"] == ["prompt", "answer", "reward"]
    assert table["rows"] == [["a", "x", "0.3333"], ["b", "y", "0"]]


def test_what_is_drawn_for_a_step_has_its_number() -> None:
    one = trainer()

    log_samples(one, "samples", prompts=["a"], answers=["x"], step=4)

    assert one.tables[0][1]["step"] == 4


def test_other_ranks_and_empty_tables_log_nothing() -> None:
    other, empty = trainer(is_main=False), trainer()

    log_samples(other, "samples", prompts=["a"], answers=["x"])
    log_samples(empty, "samples", prompts=[], answers=[])

    assert other.tables == empty.tables == []


def test_columns_of_different_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"samples has columns of different lengths: \{'prompt': 1"):
        log_samples(trainer(), "samples", prompts=["a"], answers=["x", "y"])
