"""Text of real engines, on 1, 2 and 3 ranks: that of plain transformers, whatever the ZeRO stage; training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.tasks.generation.engine_runs import NEW, PLUGINS, STEPS, TRAINED, expected_answer, run_writers
from tests.tasks.task_runs import llama


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1 rank", "2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("writers")
    return run_ranks(run_writers, folder, folder=folder, world_size=request.param, timeout=480)


@pytest.mark.parametrize("gather", ["True", "False"])
def test_text_is_that_of_one_row_alone_under_every_plugin(ranks: list[dict[str, Any]], gather: str) -> None:
    assert {name: ranks[0][gather]["stages"][name] for name in PLUGINS} == {
        "zero0": 0,
        "zero1": 1,
        "zero2": 2,
        "zero3": 3,
        "zero3_persistent": 3,
        "frozen": None,
        "frozen3": 3,
    }
    model = llama("large").eval()
    lengths = []
    for rank, found in enumerate(ranks):
        # Before any training, and of frozen models at all times.
        given = {(name, step) for name in PLUGINS for step in range(STEPS) if step == 0 or "frozen" in name}
        for kind in ("drawn", "greedy"):
            by_hand = {
                step: [
                    expected_answer(model, index, step=step, kind=kind, limit=NEW[rank])
                    for index in found[gather]["asked"]
                ]
                for step in range(STEPS)
            }
            lengths += [len(answer) for answers in by_hand.values() for answer in answers]
            for name, step in given:
                assert found[gather]["written"][name, step, kind].answers == by_hand[step], (rank, name, step, kind)
    assert len(set(lengths)) > 1
    assert [len(found[gather]["asked"]) for found in ranks] == {1: [6], 2: [3, 3], 3: [3, 3, 0]}[len(ranks)]


def test_text_of_trained_models_is_the_same_under_every_plugin_and_either_way(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for (name, step, kind), written in found["True"]["written"].items():
            same = found["True"]["written"]["zero0" if name in TRAINED else "frozen", step, kind]
            assert written == same == found["False"]["written"][name, step, kind]
    first, last = (
        [found["True"]["written"]["zero3", step, "greedy"].answers for found in ranks] for step in (0, STEPS - 1)
    )
    assert first != last  # the training changed it


@pytest.mark.parametrize("gather", ["True", "False"])
@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_as_if_nothing_had_been_written(ranks: list[dict[str, Any]], name: str, gather: str) -> None:
    undisturbed, found = (ranks[0][key]["weights"][name] for key in ("None", gather))

    assert all(torch.equal(value, found[key]) for key, value in undisturbed.items())


def test_weights_are_sharded_again_after_a_generation(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [found[gather]["is_whole"] for gather in ("True", "False")] == [[], []]
