from itertools import islice
from typing import Any

import pytest
import torch

from trainer.config import ConfigError
from trainer.data.sources import TrainingData, TrainSources, ValidationSources, name_sources


def numbers(count: int, *, first: int = 0, key: str = "number") -> list[dict[str, Any]]:
    return [{key: first + index} for index in range(count)]


def train(sources: dict[str, TrainingData], *, rank: int = 0, world_size: int = 1, start: int = 0) -> Any:
    loader = TrainSources(sources, accumulation=2, rank=rank, world_size=world_size, seed=0)
    return loader.windows(start)


def seen(window: Any, model: str | None = None) -> list[int]:
    batches = [micro.batch if model is None else micro.batch[model] for micro in window[2]]
    return [n for batch in batches for n in batch["number"].tolist()]


def data(count: int, *, first: int = 0, batch_size: int = 2) -> TrainingData:
    return TrainingData(
        train=numbers(count, first=first), validation=numbers(count, first=first), batch_size=batch_size
    )


def test_the_shared_examples_alone_are_the_batch_itself() -> None:
    sources = name_sources(data(8), {})

    (window,) = islice(train(sources), 1)

    assert [set(micro.batch) for micro in window[2]] == [{"number"}, {"number"}]


def test_a_model_finds_its_own_examples_under_its_name() -> None:
    sources = name_sources(data(8), {"critic": data(6, first=100)})

    (window,) = islice(train(sources), 1)

    assert len(seen(window)) == len(seen(window, "critic")) == 4
    assert all(n < 8 for n in seen(window)) and all(n >= 100 for n in seen(window, "critic"))


def test_several_sets_have_full_windows_and_each_example_comes_equally_often() -> None:
    """5 and 3 examples in windows of 4: after 15 windows 12 and 20 times each, with no filler anywhere."""
    sources = name_sources(data(5), {"critic": data(3, first=100)})

    windows = list(islice(train(sources), 15))

    assert all(len(micro) == 2 and not any(m.is_filler for m in micro) for *_, micro in windows)
    shared, own = [n for w in windows for n in seen(w)], [n for w in windows for n in seen(w, "critic")]
    assert {n: shared.count(n) for n in shared} == dict.fromkeys(range(5), 12)
    assert {n: own.count(n) for n in own} == dict.fromkeys(range(100, 103), 20)


def test_several_sets_are_shared_out_over_ranks_and_entered_anywhere() -> None:
    sources = name_sources(data(5, batch_size=1), {"critic": data(3, first=100, batch_size=1)})
    whole = list(islice(train({name: data(len(s.train), first=100 * bool(name)) for name, s in sources.items()}), 6))
    ranks = [list(islice(train(sources, rank=rank, world_size=2), 6)) for rank in (0, 1)]

    for model in (None, "critic"):
        for step in range(6):
            assert sorted(seen(ranks[0][step], model) + seen(ranks[1][step], model)) == sorted(seen(whole[step], model))
    later = list(islice(train(sources, world_size=2, start=4), 2))
    assert [seen(window) for window in later] == [seen(window) for window in ranks[0][4:]]


def test_epochs_are_those_of_the_first_set() -> None:
    sources = name_sources(data(5), {"critic": data(3)})
    assert [(epoch, step) for epoch, step, _ in islice(train(sources), 5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_the_longer_validation_set_goes_on_beside_fillers_of_the_shorter() -> None:
    sources = name_sources(data(5), {"critic": data(3, first=100)})

    micros = list(ValidationSources(sources, rank=0, world_size=1, limit_batches=None))

    assert [micro.batch["number"].tolist() for micro in micros] == [[0, 1], [2, 3], [4]]
    assert [micro.is_filler_for("critic") for micro in micros] == [False, False, True]
    assert [micro.is_filler_for("actor") for micro in micros] == [False, False, False]
    real = [
        n for micro in micros if not micro.is_filler_for("critic") for n in micro.batch["critic"]["number"].tolist()
    ]
    assert real == [100, 101, 102]


def test_a_field_that_has_the_name_of_a_model_with_data_is_refused() -> None:
    sources = name_sources(TrainingData(train=numbers(4, key="critic")), {"critic": data(3)})
    with pytest.raises(ConfigError, match="the shared examples have a field 'critic'"):
        next(train(sources))


def test_an_empty_set_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"models\.critic\.data\.train holds no examples"):
        train(name_sources(data(4), {"critic": TrainingData(train=[])}))


def test_without_shared_examples_only_the_models_own_are_there() -> None:
    sources = name_sources(TrainingData(), {"a": data(4), "b": data(4)})
    (window,) = islice(train(sources), 1)
    assert [set(micro.batch) for micro in window[2]] == [{"a", "b"}, {"a", "b"}]
    assert isinstance(window[2][0].batch["a"]["number"], torch.Tensor)
