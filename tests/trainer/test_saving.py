"""A run that is saved, ended and gone on with is the undisturbed run: to the last bit, or in another cut nearly so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.trainer.resume_runs import Case, check_elastic, check_exact, exact_cases, make_elastic

# Both sides in float32, after 10 updates of weights of size 1: rounding is a few 1e-8 a step.
TOLERANCE = 2e-6


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exact")
    return run_ranks(check_exact, exact_cases(), folder, folder=folder, world_size=request.param, timeout=400)


def test_ten_steps_are_four_and_six_to_the_last_bit(exact: list[dict[str, Any]]):
    for found in exact:
        assert found["exact"] == {case: [] for case in exact_cases()}


def test_the_digest_of_frozen_weights_is_the_same_sharded_or_not_and_sees_every_bit(exact: list[dict[str, Any]]):
    for found in exact:
        digests = found["digests"]
        assert digests["whole"] == digests["sharded"] is not None
        assert len({digests[name] for name in ("whole", "one bit", "two swapped")}) == 3
        assert digests["trained whole"] is None


def elastic_case(
    first: int, second: int, *, accumulation: int = 1, losses: str = "mutual", optimizer: str = "adamw"
) -> Case:
    return (first, second, accumulation, optimizer, losses, "float32")


def test_a_run_goes_on_under_other_stages_and_on_other_ranks(tmp_path: Path):
    made = [elastic_case(0, 1), elastic_case(2, 3), elastic_case(1, 0, optimizer="momentum"), elastic_case(3, 2)]
    after = [
        [elastic_case(3, 2, accumulation=2), elastic_case(1, 0)],
        [elastic_case(0, 1), elastic_case(3, 3)],
        [elastic_case(2, 3, optimizer="momentum")],
        [elastic_case(2, 1), elastic_case(0, 0, accumulation=3)],
    ]

    for before, now in ((1, 2), (2, 1)):
        folder = tmp_path / f"{before}"
        folder.mkdir()
        (checkpoints, *_) = run_ranks(make_elastic, made, folder, folder=folder, world_size=before)
        jobs = [
            (case, path, other) for case, path, others in zip(made, checkpoints, after, strict=True) for other in others
        ]
        (differences, *_) = run_ranks(check_elastic, jobs, folder / "now", folder=folder, world_size=now)
        assert max(differences) < TOLERANCE, dict(zip(jobs, differences, strict=True))
