"""The examples of a run: one set that all models share, and those that are a model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, default_collate

from trainer.config import ConfigError
from trainer.data.loader import SHARED, MicroBatch, TrainLoader, ValidationLoader, data_key
from trainer.data.text import TextDataset
from trainer.task import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class TrainingData:
    """The examples of a run, or of one of its models.

    Args:
        train: Map-style dataset; items are dicts of tensors and numbers. None for a run that only validates.
        batch_size: Micro-batch per rank.
        collate: list[item] -> batch; default: torch's.
        noun: What the examples are called where their metrics are shown.
    """

    train: Dataset[Any] | None = None
    validation: Dataset[Any] | None = None
    batch_size: int = 8
    collate: Callable[[list[Any]], Batch] = default_collate
    num_workers: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None
    noun: str = "examples"

    @property
    def parts(self) -> dict[str, Dataset[Any]]:
        """The datasets that are there, by "train" and "validation"."""
        both = {"train": self.train, "validation": self.validation}
        return {part: dataset for part, dataset in both.items() if dataset is not None}

    def collated(self, part: str, indices: Iterable[int]) -> Batch:
        """Returns examples of a part, collated."""
        dataset = self.parts[part]
        return self.collate([dataset[index] for index in indices])


def name_sources(shared: TrainingData, own: Mapping[str, TrainingData]) -> dict[str, TrainingData]:
    """Returns the sets by the model whose they are, the shared one first, where it holds anything."""
    has_shared = shared.train is not None or shared.validation is not None
    return ({SHARED: shared} if has_shared or not own else {}) | dict(own)


def find_missing_fields(
    sources: Mapping[str, TrainingData], needed: Sequence[str], check: Callable[[Batch, str], list[str]] | None = None
) -> list[str]:
    """Returns what is wrong with batches that lack a field, seen from the first example of each set.

    Args:
        check: (a batch that has them, the key of its set) -> what else is wrong with it.
    """
    found = []
    for name, source in sources.items():
        for part, dataset in source.parts.items():
            if len(dataset) == 0:  # type: ignore[arg-type]
                continue
            batch = source.collated(part, [0])
            key = data_key(name, part)
            if not isinstance(batch, Mapping):
                kind = type(batch).__name__
                found.append(f"{key}: a batch is of type {kind}; datasets' items and collate must give dicts")
                continue
            missing = [field for field in needed if field not in batch]
            if missing:
                found.append(
                    f"{key}: the task needs '{missing[0]}' in every batch, but these examples give {', '.join(batch)}; "
                    "choose data of the kind that the task is for"
                )
            elif check is not None:
                found += check(dict(batch), key)
    return found


class TrainSources:
    """Windows of micro-batches in an order that the seed decides, from all sets at once.

    With one set, an epoch's last window may be short. With several, each goes on into its next epoch, so that every
    window is full for every model; an epoch is then one of the first set.
    """

    def __init__(
        self, sources: Mapping[str, TrainingData], *, accumulation: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.loaders = {
            name: TrainLoader(
                source.train,
                **_options(name, source),
                accumulation=accumulation,
                rank=rank,
                world_size=world_size,
                seed=seed,
                wraps=len(sources) > 1,
            )
            for name, source in sources.items()
            if source.train is not None
        }

    @property
    def row_sources(self) -> list[str]:
        """The names of what the shared rows come from, as for the validation sets."""
        return _row_sources(self.loaders)

    @property
    def steps_per_epoch(self) -> int:
        return next(iter(self.loaders.values())).steps_per_epoch

    def windows(self, start_step: int = 0) -> Iterator[tuple[int, int, list[MicroBatch]]]:
        """Yields (epoch, step in the epoch, micro-batches) forever; examples before start_step are never read."""
        streams = {name: loader.windows(start_step) for name, loader in self.loaders.items()}
        while True:
            windows = {name: next(stream) for name, stream in streams.items()}
            epoch, step, _ = next(iter(windows.values()))
            micro_batches = zip(*(window for *_, window in windows.values()), strict=True)
            yield epoch, step, [_merge(dict(zip(windows, micros, strict=True))) for micros in micro_batches]


class ValidationSources:
    """The validation sets once, side by side; where one has ended, a filler stands in."""

    def __init__(
        self, sources: Mapping[str, TrainingData], *, rank: int, world_size: int, limit_batches: int | None
    ) -> None:
        self.loaders = {
            name: ValidationLoader(
                source.validation,
                **_options(name, source),
                rank=rank,
                world_size=world_size,
                limit_batches=limit_batches,
            )
            for name, source in sources.items()
            if source.validation is not None
        }

    @property
    def row_sources(self) -> list[str]:
        """What the shared rows come from, as their `source` column says; none where they have none."""
        return _row_sources(self.loaders)

    @property
    def source_groups(self) -> tuple[list[str], list[int]]:
        """The names under which metrics tell sources apart, and the place among them of each of `row_sources`."""
        shared = self.loaders.get(SHARED)
        return shared.dataset.groups if shared is not None and isinstance(shared.dataset, TextDataset) else ([], [])

    def __len__(self) -> int:
        return max(len(loader) for loader in self.loaders.values())

    def __iter__(self) -> Iterator[MicroBatch]:
        first: dict[str, MicroBatch] = {}
        for micros in zip_longest(*self.loaders.values()):
            here = dict(zip(self.loaders, micros, strict=True))
            first = first or dict(here)
            yield _merge({name: micro or _filler(name, first[name]) for name, micro in here.items()})


def _options(name: str, source: TrainingData) -> dict[str, Any]:
    return {
        "name": name,
        "collate": source.collate,
        "batch_size": source.batch_size,
        "num_workers": source.num_workers,
    }


def _filler(name: str, micro: MicroBatch) -> MicroBatch:
    return MicroBatch(batch=micro.batch, fillers={name: True}, indices=micro.indices)


def _merge(micros: Mapping[str, MicroBatch]) -> MicroBatch:
    """Returns one micro-batch: the shared one's entries, and each model's own under its name."""
    if list(micros) == [SHARED]:
        return micros[SHARED]
    shared = micros[SHARED].batch if SHARED in micros else {}
    own = {name: micro.batch for name, micro in micros.items() if name != SHARED}
    clash = sorted(shared.keys() & own.keys())
    if clash:
        raise ConfigError(
            f"the shared examples have a field '{clash[0]}', and models.{clash[0]} has data of its own, which stand "
            "in the batch under that name; rename one of them"
        )
    return MicroBatch(
        batch={**shared, **own},
        fillers={name: micro.is_filler for name, micro in micros.items()},
        indices={name: micro.indices[name] for name, micro in micros.items()},
    )


def _row_sources(loaders: Mapping[str, TrainLoader] | Mapping[str, ValidationLoader]) -> list[str]:
    shared = loaders.get(SHARED)
    return list(shared.dataset.sources) if shared is not None and isinstance(shared.dataset, TextDataset) else []
