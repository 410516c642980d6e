"""A window is prepared once for all its passes, also where a run is ended between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer.rollout_runs import Drawn, go_on, net, run_in_parts
from tests.trainer.test_trainer import reset_accelerate
from trainer import ConfigError, ModelSpec, MultiModelTrainer, TrainingData


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return folder / "run", run_ranks(run_in_parts, folder / "run", folder=folder, world_size=request.param)


def test_a_window_is_prepared_once_for_all_its_passes(ranks: tuple[Path, list[Any]]) -> None:
    for found in ranks[1]:
        assert found["whole"]["prepared"] == [1, 4, 7]


def test_an_epoch_ends_with_the_last_pass_over_its_last_window(ranks: tuple[Path, list[Any]]) -> None:
    for found in ranks[1]:
        assert found["whole"]["epochs"] == [("start", 0), ("end", 0), ("start", 1)]


def test_a_run_that_was_ended_between_two_passes_goes_on_with_what_was_prepared(ranks: tuple[Path, list[Any]]) -> None:
    for found in ranks[1]:
        assert found["rest"]["prepared"] == [7]  # steps 4 to 6 share a window, and the first part ended with 5
        for weight, whole in zip(found["rest"]["weights"], found["whole"]["weights"], strict=True):
            assert torch.equal(weight, whole)


def test_on_other_ranks_the_window_is_prepared_anew(ranks: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, found = ranks
    others = run_ranks(go_on, folder.with_name("ended"), folder=tmp_path, world_size=3 - len(found))

    for other in others:
        assert other["prepared"] == [6, 7]


@pytest.mark.parametrize("passes", [0, 1.5, True])
def test_what_is_no_number_of_passes_is_refused(passes: Any) -> None:
    reset_accelerate()
    task = Drawn()
    task.passes = passes
    trainer = MultiModelTrainer({"model": {"zero_optimization": {"stage": 0}}}, max_steps=1)
    data = TrainingData(train=[{"x": torch.zeros(4)}], batch_size=1)

    with pytest.raises(ConfigError, match=r"Drawn.passes=.*: must be a whole number of at least 1"):
        trainer.fit(task, models={"model": ModelSpec(build=net)}, data=data)
