"""The same examples have the same identity, others have another, and those that vary have no digest."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import TrainingData
from trainer.data.identity import LOOKED_AT, identify, identify_sources
from trainer.data.loader import SHARED


def examples(count: int = 100) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(3, generator=generator), "ids": [index, 1, 23], "text": f"number {index}"}
        for index in range(count)
    ]


@dataclass
class Example:
    label: int
    inner: Any = None


class Augmented:
    """Examples that are drawn anew each time."""

    def __init__(self, source: Sequence[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return {**self.source[index], "noise": torch.rand(2)}


def looked_at(count: int) -> list[int]:
    """Returns which examples are read."""
    seen: list[int] = []

    class Watched(Augmented):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return index

    identify(Watched(range(count)))
    return seen


def test_the_same_examples_have_the_same_identity():
    found = identify(examples())

    assert found == identify(copy.deepcopy(examples())) and found["examples"] == 100 and len(found["digest"]) == 64


def test_any_change_of_an_example_that_is_looked_at_changes_the_digest():
    before = identify(examples())
    places = sorted(set(looked_at(100)))
    assert len(places) == LOOKED_AT and places[0] == 0 and places[-1] == 99

    for place in places:
        for change in ({"x": torch.zeros(3)}, {"text": "other"}, {"ids": [place, 12, 3]}, {"more": None}):
            changed = examples()
            changed[place] = {**changed[place], **change}

            assert identify(changed)["digest"] != before["digest"], (place, change)


def test_another_number_of_examples_is_another_identity():
    assert identify(examples(100)) != identify(examples(101))
    assert identify([]) == identify([]) and identify([])["examples"] == 0
    assert identify(examples(1))["examples"] == 1


def test_few_examples_are_all_looked_at():
    assert sorted(set(looked_at(5))) == [0, 1, 2, 3, 4]


def test_examples_that_are_drawn_anew_have_no_digest():
    assert identify(Augmented(examples())) == {"examples": 100, "digest": None}


UNLIKE = [
    ([1, 23], [12, 3]), (["ab", "c"], ["a", "bc"]), ([[1], 2], [[1, 2]]), ({"a1": 2}, {"a": 12}), ({"a": 1}, ["a", 1]),
    (1, "1"), (1, 1.0), (True, 1), (None, "None"), (0.0, -0.0), (b"a", "a"), (b"a", b"b"), ({1, 2}, {1, 3}), (1j, 2j),
    (np.int64(1), np.int64(2)), (np.float32(0.1), np.float32(0.2)), (np.array([1, 2]), np.array([2, 1])),
    (np.array([1]), np.array([1], dtype=np.int32)), (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.array(["a", [1]], dtype=object), np.array(["a", [2]], dtype=object)),
    (torch.zeros(2, 3), torch.zeros(3, 2)), (torch.zeros(2), torch.zeros(2).bfloat16()),
    (torch.tensor(1), torch.tensor(2)),
    (torch.zeros(0, 2), torch.zeros(0, 3)), (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(3, 2)), (torch.tensor([True]), torch.tensor([False])),
    (Example(1), Example(2)), (Example(1, [2]), Example(1, [3])), (Example(1, Example(2)), Example(1, Example(3))),
    (Example(1), {"label": 1, "inner": None}), ([[], []], [[]]),
    ([torch.tensor([1, 2])], [torch.tensor([1]), torch.tensor([2])]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), UNLIKE, ids=repr)
def test_unlike_examples_have_unlike_digests(one: Any, other: Any):
    first, second = identify([one])["digest"], identify([other])["digest"]

    assert first != second and None not in (first, second)
    assert identify([copy.deepcopy(one)])["digest"] == first


def test_a_sparse_tensor_and_an_object_that_holds_itself_do_not_end_the_run():
    ring = Example(1)
    ring.inner = [ring]

    assert identify([ring]) == {"examples": 1, "digest": None}
    assert identify([torch.eye(2).to_sparse()])["digest"] is not None


def test_the_order_of_fields_does_not_matter():
    assert identify([{"a": 1, "b": 2}]) == identify([{"b": 2, "a": 1}])


ACROSS = {"set": {"a", "b", "c"}, "objects": np.array(["a", {"b", "d"}], dtype=object), "x": torch.ones(2)}
PROGRAM = """
from tests.trainer.data.test_identity import ACROSS, identify
print(identify([ACROSS])["digest"])
"""


def test_another_process_finds_the_same_digest():
    root = Path(__file__).parents[3]

    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        env={"PYTHONHASHSEED": "1"},
        text=True,
        capture_output=True,
        check=True,
    )

    assert result.stdout.split()[-1] == identify([ACROSS])["digest"]


def test_each_set_is_identified_under_its_key():
    data, own = examples(20), examples(10)
    sources = {
        SHARED: TrainingData(train=data, validation=own, batch_size=1),
        "critic": TrainingData(train=own, batch_size=1),
    }

    found = identify_sources(sources)

    assert list(found) == ["data.train", "data.validation", "models.critic.data.train"]
    assert found["data.train"] == identify(data) and found["models.critic.data.train"] == identify(own)


def test_the_global_random_numbers_of_python_are_left_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)

    identify(examples())

    assert random.random() == expected
