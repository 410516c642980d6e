"""Micro-batches come in the planned order, from any step on, without touching what is skipped."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trainer.config import ConfigError
from trainer.data import TrainLoader, ValidationLoader


class Numbers:
    """Remembers which examples were read."""

    def __init__(self, size):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"number": index}


def train_loader(dataset, **options):
    defaults = {"batch_size": 2, "accumulation": 2, "rank": 0, "world_size": 1, "seed": 0}
    return TrainLoader(dataset, collate=default_collate, **(defaults | options))


def numbers(windows, count):
    return [
        (epoch, step, [(micro.batch["number"].tolist(), micro.is_filler) for micro in window])
        for epoch, step, window in islice(windows, count)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_at_any_step_gives_what_the_uninterrupted_run_gives(num_workers):
    whole = numbers(train_loader(Numbers(11)).windows(), 8)  # 3 windows an epoch

    for start in (0, 1, 3, 5):
        loader = train_loader(Numbers(11), num_workers=num_workers)
        assert numbers(loader.windows(start), 8 - start) == whole[start:]
    assert [step for _, step, _ in whole] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_skipped_examples_are_never_read():
    dataset = Numbers(40)
    loader = train_loader(dataset)

    (window,) = numbers(loader.windows(9), 1)  # the last window of the first epoch

    assert loader.steps_per_epoch == 10
    assert dataset.read == [number for batch, _ in window[2] for number in batch]
    assert len(dataset.read) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_an_epoch_without_repeating_or_dropping(world_size):
    ranks = [train_loader(Numbers(17), rank=rank, world_size=world_size) for rank in range(world_size)]
    epochs = [numbers(loader.windows(), loader.steps_per_epoch) for loader in ranks]

    seen = [
        n for epoch in epochs for *_, window in epoch for batch, is_filler in window if not is_filler for n in batch
    ]

    assert sorted(seen) == list(range(17))
    assert len({tuple(len(window) for *_, window in epoch) for epoch in epochs}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 8, 11])
def test_validation_sees_every_example_once_in_the_same_number_of_batches(world_size, size):
    loaders = [
        ValidationLoader(Numbers(size), collate=default_collate, batch_size=2, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    passes = [[list(loader) for loader in loaders] for _ in range(2)]

    for batches in passes:
        seen = [n for rank in batches for micro in rank if not micro.is_filler for n in micro.batch["number"].tolist()]
        assert sorted(seen) == list(range(size))
        assert {len(rank) for rank in batches} == {len(loaders[0])}


def test_validation_reads_no_more_than_its_limit():
    dataset = Numbers(20)

    loader = ValidationLoader(dataset, collate=default_collate, batch_size=2, rank=0, world_size=1, limit_batches=3)

    assert len(loader) == len(list(loader)) == 3
    assert dataset.read == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_state_is_neither_read_nor_changed(num_workers):
    def draw_after(use):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        use()
        return torch.rand(1).item(), np.random.rand(), random.random()

    loader = train_loader(Numbers(11), num_workers=num_workers)

    assert draw_after(lambda: numbers(loader.windows(), 4)) == draw_after(lambda: None)


def test_empty_dataset_is_refused_by_key():
    with pytest.raises(ConfigError, match=r"data\.train holds no examples"):
        train_loader(Numbers(0))
    with pytest.raises(ConfigError, match=r"data\.validation holds no examples"):
        ValidationLoader(Numbers(0), collate=default_collate, batch_size=2, rank=0, world_size=1)
