"""One update is the mean over its items, whatever the ranks, micro-batches, accumulation, padding and packing."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.tasks.normalisation_runs import LAYOUTS, difference, make_examples, reference, run_layouts

# One SGD step of size 0.02 in float32, against an example at a time in float64.
TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("normalisation")
    return run_ranks(run_layouts, folder, folder=folder, world_size=request.param)[0]


def test_every_cut_padding_and_packing_gives_the_same_update(found: dict[str, float]) -> None:
    cases = {name: value for name, value in found.items() if not name.startswith("plain means")}
    assert {name.split()[0] for name in cases} == {"right", "left", "clipped", "zero0", "zero3", "packed", "pairs"}
    assert {name: value for name, value in cases.items() if not value <= TOLERANCE} == {}


def test_plain_means_give_another_update_in_every_cut(found: dict[str, float]) -> None:
    """So the test is seen to bite; a micro-batch of everything is the only cut that plain means survive."""
    plain = {name: value for name, value in found.items() if name.startswith("plain means")}
    assert plain
    for name, value in plain.items():
        assert (value <= TOLERANCE) == (name == "plain means 32x1"), name


def test_clipping_and_plain_means_change_the_reference_by_far_more_than_the_tolerance() -> None:
    whole = reference()
    assert difference(reference(clip=0.5), whole) > 100 * TOLERANCE
    assert difference(reference(plain_means_of=8), whole) > 100 * TOLERANCE


def test_one_example_of_the_batch_has_no_label() -> None:
    assert [example.num_counted for example in make_examples()].count(0) == 1
    assert all((ranks * micro * windows in (32, 36)) for ranks in LAYOUTS for micro, windows in LAYOUTS[ranks])
