"""A run that is saved, ended and gone on with is the undisturbed run: to the last bit, or in another cut nearly so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.trainer.saving.resume_runs import Case, Job, change_adam, check_elastic, exact_cases, run_checks, run_long
from trainer.config import ConfigError
from trainer.saving.content import check_data

# Both sides in float32, after 10 updates of weights of size 1: rounding is a few 1e-8 a step.
TOLERANCE = 2e-6


def case(first: int, second: int, *, accumulation: int = 1, optimizer: str = "adamw") -> Case:
    return (first, second, accumulation, optimizer, "mutual", "float32")


MADE = [case(0, 1), case(2, 3), case(1, 0, optimizer="momentum"), case(3, 2)]
GOES_ON_AS = [
    [case(3, 2, accumulation=2), case(1, 0)],
    [case(0, 1), case(3, 3)],
    [case(12, 13, optimizer="momentum")],
    [case(2, 1), case(0, 0, accumulation=3)],
]


def jobs_of(made: list[Path]) -> list[Job]:
    return [
        (before, path, after) for before, path, others in zip(MADE, made, GOES_ON_AS, strict=True) for after in others
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank and two found by themselves, and each from the other's checkpoints."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two", "back")]
    one = run_ranks(run_checks, MADE, [], folders[0], folder=folders[0], world_size=1, timeout=400)
    jobs = jobs_of(one[0]["made"])
    two = run_ranks(run_checks, MADE, jobs, folders[1], folder=folders[1], world_size=2, timeout=400)
    back = run_ranks(check_elastic, jobs_of(two[0]["made"]), folders[2], folder=folders[2], world_size=1, timeout=400)
    return {"1 rank": one, "2 ranks": two, "1 to 2 ranks": two[0]["differences"], "2 to 1 ranks": back[0]}


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_ten_steps_are_four_and_six_to_the_last_bit(found: dict[str, Any], ranks: str):
    for rank in found[ranks]:
        assert rank["exact"] == {case: [] for case in exact_cases()}


@pytest.mark.parametrize("ranks", ["1 to 2 ranks", "2 to 1 ranks"])
def test_a_run_goes_on_under_other_stages_and_on_other_ranks(found: dict[str, Any], ranks: str):
    assert len(found[ranks]) == sum(map(len, GOES_ON_AS))
    assert max(found[ranks]) < TOLERANCE, found[ranks]


@pytest.mark.parametrize("ranks", ["1 rank", "2 ranks"])
def test_the_digest_of_frozen_weights_is_the_same_sharded_or_not_and_sees_every_bit(found: dict[str, Any], ranks: str):
    for rank in found[ranks]:
        digests = rank["digests"]
        assert digests["whole"] == digests["sharded"] is not None
        assert len({digests[name] for name in ("whole", "one bit", "two swapped")}) == 3
        assert digests["trained whole"] is None
        assert digests["all of whole"] == digests["all of sharded"] == digests["whole"]
        assert digests["all trained whole"] not in (None, digests["whole"])


def test_a_longer_run_has_a_longer_schedule(found: dict[str, Any]):
    longer = found["1 rank"][0]["longer"]
    assert {key: longer[key] for key in ("steps", "horizon", "updates")} == {"steps": 20, "horizon": 20, "updates": 20}


def test_a_new_run_does_not_begin_among_the_checkpoints_of_another(found: dict[str, Any]):
    for ranks in ("1 rank", "2 ranks"):
        assert all("holds the checkpoints of an earlier run" in rank["longer"]["refused"] for rank in found[ranks])


def test_every_group_of_ranks_waits_as_long_as_it_was_told(found: dict[str, Any]):
    assert found["2 ranks"][0]["timeouts"] == {123.0}, "DeepSpeed makes groups of its own"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"examples": 9, "digest": "x"}, "data.train: holds 9 examples, and the run began with 10; put the data back"),
        (
            {"examples": 10, "digest": "y"},
            "data.train: holds other examples than the run began with; put the data back",
        ),
        ({"examples": 10, "digest": "x"}, None),
    ],
)
def test_data_that_changed_are_refused(now: dict[str, Any], said: str | None, tmp_path: Path):
    (tmp_path / "trainer.json").write_text(json.dumps({"data": {"data.train": {"examples": 10, "digest": "x"}}}))

    if said is None:
        check_data(tmp_path, {"data.train": now, "data.validation": now})
        return
    with pytest.raises(ConfigError) as refused:
        check_data(tmp_path, {"data.train": now})
    assert refused.value.problems[0].startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_adam_goes_on_from_torchs_and_back(ranks: int, tmp_path: Path):
    found = run_ranks(change_adam, tmp_path, folder=tmp_path, world_size=ranks, timeout=600)[0]

    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
def test_memory_is_flat_over_three_thousand_steps(tmp_path: Path):
    for rank, seen in enumerate(run_ranks(run_long, 3000, tmp_path, folder=tmp_path, world_size=2, timeout=1800)):
        steps, sizes = np.array([pair for pair in seen if pair[0] > 1500]).T
        slope = np.polyfit(steps, sizes, 1)[0] * 1000 / sizes.mean()
        print(f"rank {rank}: {sizes.mean() / 1e6:.0f} MB, slope {slope:.3%} per 1000 steps")
        assert slope < 0.01
