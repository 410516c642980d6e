"""Ranks that the tests of three tasks share: a spawn costs seconds."""

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tasks.logits.log_prob_runs import run_token_tasks
from tests.tasks.task_runs import run_tasks


@pytest.fixture(scope="session", params=[1, 2, 3], ids=["1 rank", "2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("tasks")
    return run_ranks(run_tasks, folder, folder=folder, world_size=request.param)


@pytest.fixture(scope="session", params=[1, 2], ids=["1 rank", "2 ranks"])
def token_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found of token log-probabilities and of task=sft."""
    folder = tmp_path_factory.mktemp("tokens")
    return run_ranks(run_token_tasks, folder, folder=folder, world_size=request.param)
