"""Examples that are longer than a model's positions are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from trainer.data.example import Example
from trainer.data.lengths import find_length_problem, tell_lengths
from trainer.data.preferences import Pair, PreferenceDataset
from trainer.data.sources import TrainingData
from trainer.data.text import TextDataset


def model(positions: int | None) -> Any:
    config = SimpleNamespace(max_position_embeddings=positions)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))


def example(size: int, *, places: list[int] | None = None) -> Example:
    tokens = np.arange(size)
    return Example(input_ids=tokens, labels=tokens, position_ids=None if places is None else np.array(places))


TEXT = TextDataset([example(5), example(9)], prompts=["a", "b"])
PACKED = TextDataset([example(6, places=[0, 1, 2, 0, 1, 2])], prompts=["a"])
PAIRS = PreferenceDataset([Pair(chosen=example(3), rejected=example(8))])


@pytest.mark.parametrize(("dataset", "longest"), [(TEXT, 9), (PACKED, 3), (PAIRS, 8)])
def test_the_longest_example_is_held_against_the_positions(dataset: Any, longest: int) -> None:
    fits = find_length_problem("student", model(longest), TrainingData(train=dataset))
    told = find_length_problem("student", model(longest - 1), TrainingData(validation=dataset))

    assert fits is None
    assert told is not None and told.startswith(f"models.student has {longest - 1} positions, but the longest example")


def test_what_says_no_number_is_not_asked() -> None:
    assert find_length_problem("student", model(None), TrainingData(train=TEXT)) is None
    assert find_length_problem("student", nn.Linear(1, 1), TrainingData(train=TEXT)) is None
    own: Any = [1, 2, 3]
    assert find_length_problem("student", model(2), TrainingData(train=own)) is None


def test_each_model_is_held_against_the_data_that_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    modules: Any = {name: SimpleNamespace(module=model(8)) for name in ("student", "apart", "teacher")}
    own = TrainingData(train=PACKED)
    specs: Any = {name: SimpleNamespace(data=own if name == "apart" else None) for name in modules}

    tell_lengths(modules, specs, TrainingData(train=TEXT), own_tokens=["teacher"])

    assert [message.partition(",")[0] for message in caplog.messages] == ["models.student has 8 positions"]
