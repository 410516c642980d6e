"""Which examples a step sees depends on the seed and the step, not on how they are cut up."""

from itertools import islice

import numpy as np
import pytest
import torch

from trainer.data import BatchPlan


def plans(num_examples, *, batch_size, accumulation, world_size, seed=0, shuffle=True):
    return [
        BatchPlan(
            num_examples,
            batch_size=batch_size,
            accumulation=accumulation,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
        )
        for rank in range(world_size)
    ]


def epoch_of(plan, epoch=0):
    """Returns the windows of one epoch, each a list of micro-batches."""
    first = epoch * plan.num_windows
    return [window for *_, window in islice(plan.windows(first), plan.num_windows)]


def examples_of(windows):
    return [index for window in windows for micro in window if not micro.is_filler for index in micro.indices]


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), [(1, 2, 4), (2, 2, 2), (4, 2, 1), (2, 1, 4)])
@pytest.mark.parametrize("num_examples", [5, 32, 37])
def test_global_batch_is_the_same_set_whatever_its_cut(num_examples, world_size, batch_size, accumulation):
    (reference,) = plans(num_examples, batch_size=8, accumulation=1, world_size=1)
    ranks = plans(num_examples, batch_size=batch_size, accumulation=accumulation, world_size=world_size)

    for epoch in (0, 1):
        expected = [sorted(examples_of([window])) for window in epoch_of(reference, epoch)]
        by_rank = [epoch_of(plan, epoch) for plan in ranks]
        found = [sorted(examples_of(windows)) for windows in zip(*by_rank, strict=True)]
        assert found == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_examples", [1, 2, 7, 24, 25, 29, 37])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_is_seen_once_an_epoch_and_all_ranks_stay_in_step(num_examples, world_size, shuffle):
    ranks = [
        epoch_of(plan)
        for plan in plans(num_examples, batch_size=2, accumulation=3, world_size=world_size, shuffle=shuffle)
    ]

    seen = [index for windows in ranks for index in examples_of(windows)]
    num_micro = {tuple(len(window) for window in windows) for windows in ranks}

    assert sorted(seen) == list(range(num_examples))
    assert len(num_micro) == 1
    assert all(micro.indices for windows in ranks for window in windows for micro in window)


def test_rank_with_nothing_left_gets_one_filler():
    ranks = plans(5, batch_size=2, accumulation=1, world_size=2, shuffle=False)

    assert [[micro.indices for micro in window] for window in epoch_of(ranks[0])] == [[[0, 1]], [[4]]]
    assert [[micro.is_filler for micro in window] for window in epoch_of(ranks[1])] == [[False], [True]]
    assert [[micro.indices for micro in window] for window in epoch_of(ranks[1])] == [[[2, 3]], [[4]]]


def test_last_window_has_fewer_micro_batches_and_shares_what_is_left():
    ranks = plans(31, batch_size=2, accumulation=3, world_size=2, shuffle=False)  # 12 + 12 + 7 examples

    sizes = [[[len(micro.indices) for micro in window] for window in epoch_of(plan)] for plan in ranks]

    assert sizes[0] == [[2, 2, 2], [2, 2, 2], [2, 2]]
    assert sizes[1] == [[2, 2, 2], [2, 2, 2], [2, 1]]


def test_order_differs_between_epochs_and_seeds_and_repeats_for_the_same():
    (plan,) = plans(100, batch_size=4, accumulation=1, world_size=1)
    (other,) = plans(100, batch_size=4, accumulation=1, world_size=1, seed=1)

    assert np.array_equal(plan.order(3), plan.order(3))
    assert not np.array_equal(plan.order(0), plan.order(1))
    assert not np.array_equal(plan.order(0), other.order(0))
    assert not np.array_equal(plan.order(1), other.order(0)), "seed + epoch would repeat between runs"


def test_windows_name_their_epoch_and_step_from_any_start():
    (plan,) = plans(10, batch_size=4, accumulation=1, world_size=1)

    places = [(epoch, step) for epoch, step, _ in islice(plan.windows(4), 4)]

    assert places == [(1, 1), (1, 2), (2, 0), (2, 1)]


def test_global_random_state_is_neither_read_nor_changed():
    (plan,) = plans(10, batch_size=4, accumulation=1, world_size=1)
    torch.manual_seed(0)
    np.random.seed(0)
    first = plan.order(0)
    after = (torch.rand(1), np.random.rand())

    torch.manual_seed(0)
    np.random.seed(0)

    assert (torch.rand(1), np.random.rand()) == after
    assert np.array_equal(plan.order(0), first)
