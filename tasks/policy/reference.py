"""What a policy is compared with: a frozen model, itself without its adapters, a recording of its start, or nothing."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from tasks.teacher_cache.rows import DIGEST_BYTES, Digests, describe_rows
from trainer import Batch, ConfigError, ModelHandle, MultiModelTrainer, digest_fixed, digest_weights, gather, is_adapted

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

FILE = "reference_log_probs.safetensors"
WITHOUT_MODEL = ("adapter", "cached", "none")
_FORMAT = 1
_TELL_SECONDS = 10.0

Ask = Callable[[ModelHandle, Batch], Tensor]  # (a model, answers) -> log-probability of each answer, (rows,)


class Reference(Protocol):
    """Gives the log-probability that the reference has of each answer of a batch, (rows,) without a graph."""

    def log_probs(self, batch: Batch) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class NoReference:
    """A reference to which all answers are alike."""

    def log_probs(self, batch: Batch) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True)
class FrozenReference:
    """A frozen model of its own."""

    model: ModelHandle
    ask: Ask

    def log_probs(self, batch: Batch) -> Tensor | None:
        with torch.no_grad():
            return self.ask(self.model, batch)


@dataclass(frozen=True, kw_only=True)
class AdapterOff:
    """A model without its LoRA adapters: its base model, which is what it was before training.

    Args:
        models: Those of the run; the one that is asked may be another later, as when an export is scored.
    """

    models: Mapping[str, ModelHandle]
    name: str
    ask: Ask

    def log_probs(self, batch: Batch) -> Tensor | None:
        model = self.models[self.name]
        module: PeftModel = model.module
        # Or the base model's dropout would be noise in the reference.
        with model.evaluating(), torch.no_grad(), module.disable_adapter():
            return self.ask(model, batch)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a model says of answers, each known by a digest of its tokens.

    Args:
        digests: Of the answers, sorted, (N,).
        values: The log-probability of each, (N,) float32.
        path: Its file, for people; None of one that is in memory only.
    """

    digests: Digests
    values: np.ndarray[Any, np.dtype[np.float32]]
    path: Path | None = None

    def log_probs(self, batch: Batch) -> Tensor | None:
        wanted = digests_of(batch)
        places = self._places(wanted)
        if (self.digests[places] != wanted).any():
            where = f"task.cache={self.path}" if self.path is not None else "the recording of the reference"
            raise ConfigError(
                f"{where}: an answer of this batch is not in it; the data must be the same in every epoch"
            )
        return torch.from_numpy(self.values[places]).to(batch["input_ids"].device)

    def lacks(self, digests: Digests) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns which answers are not in it, (len(digests),)."""
        if not len(self.digests):
            return np.ones(len(digests), dtype=bool)
        missing: np.ndarray[Any, np.dtype[np.bool_]] = self.digests[self._places(digests)] != digests
        return missing

    def _places(self, digests: Digests) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.searchsorted(self.digests, digests).clip(max=len(self.digests) - 1)

    def joined(self, others: Sequence[tuple[Digests, np.ndarray[Any, Any]]]) -> Recording:
        """Returns a recording of these answers too."""
        digests = np.concatenate([self.digests, *(digests for digests, _ in others)])
        values = np.concatenate([self.values, *(values for _, values in others)])
        kept, places = np.unique(digests, return_index=True)
        return Recording(digests=kept, values=values[places].astype(np.float32), path=self.path)


def digests_of(batch: Batch) -> Digests:
    """Returns a digest of each answer with its prompt: of its real tokens and of which of them count, (rows,)."""
    return describe_rows(batch, mask="completion").digests


def record_reference(
    trainer: MultiModelTrainer, policy: ModelHandle, ask: Ask, *, answers: Callable[[Batch], Batch], path: Path | None
) -> Recording:
    """Returns what the policy says now of all answers of the run, from a file as far as it holds them.

    To be called while the policy has its start weights, which it has in `setup`; of one with adapters its base model
    speaks. Every rank must call it. The file is known by the weights and its answers by their tokens: one of other
    weights is refused, and answers that it lacks are added to it.

    Args:
        answers: The answers of a batch of the data, as `ask` takes them.
        path: The file; None: nothing is kept.
    """
    key = _key(policy)
    found = _open(trainer, path, key)
    speaker = AdapterOff(models={policy.name: policy}, name=policy.name, ask=ask) if is_adapted(policy.module) else None
    with policy.evaluating():
        new = list(_record(trainer, policy, found, answers, speaker or FrozenReference(model=policy, ask=ask)))
    by_rank = gather(new)
    found = found.joined([part for parts in by_rank for part in parts])
    if any(by_rank) and path is not None:
        problem = _write(found, path, key) if trainer.is_main else None
        if problem := gather(problem)[0]:
            raise ConfigError(problem)
    return found


def _key(policy: ModelHandle) -> dict[str, Any]:
    # Of adapters, whose random half depends on the seed, nothing is asked: the base model speaks.
    weights = digest_fixed(policy) if is_adapted(policy.module) else digest_weights(policy)
    return {"format": _FORMAT, "weights": weights, "dtype": str(policy.dtype).removeprefix("torch.")}


def _record(
    trainer: MultiModelTrainer,
    policy: ModelHandle,
    found: Recording,
    answers: Callable[[Batch], Batch],
    speaker: Reference,
) -> Iterator[tuple[Digests, np.ndarray[Any, Any]]]:
    """Yields this rank's share of the answers that the recording lacks; all ranks run as many forwards."""
    batches = list(_lacking(trainer, found, answers))
    totals = gather(len(batches))
    if not any(totals):
        return
    if trainer.is_main:
        log.info("recording what models.%s says of the data before training: %d batches", policy.name, sum(totals))
    began = told = time.monotonic()
    for index in range(max(totals)):
        # A rank that is done goes on, since sharded weights need all ranks.
        batch = (
            answers(_load(trainer, *batches[min(index, len(batches) - 1)])) if batches else _sample(trainer, answers)
        )
        values = speaker.log_probs(batch)
        assert values is not None
        if index < len(batches):
            yield digests_of(batch), values.float().cpu().numpy()
        if trainer.is_main and time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            log.info("recorded %d of %d batches in %.0f s", index + 1, max(totals), told - began)


Place = tuple[str, str, list[int]]  # the set's name, "train" or "validation", positions in it


def _lacking(trainer: MultiModelTrainer, found: Recording, answers: Callable[[Batch], Batch]) -> Iterator[Place]:
    for name, part, places in _share(trainer):
        if found.lacks(digests_of(answers(_collate(trainer, name, part, places)))).any():
            yield name, part, places


def _share(trainer: MultiModelTrainer) -> Iterator[Place]:
    """Yields this rank's share of all examples, a batch at a time."""
    for name, source in trainer.sources.items():
        for part, dataset in (("train", source.train), ("validation", source.validation)):
            size, count = source.batch_size, 0 if dataset is None else len(dataset)  # type: ignore[arg-type]
            for start in range(trainer.rank * size, count, trainer.world_size * size):
                yield name, part, list(range(start, min(start + size, count)))


def _collate(trainer: MultiModelTrainer, name: str, part: str, places: Sequence[int]) -> Batch:
    source = trainer.sources[name]
    dataset: Any = source.train if part == "train" else source.validation
    return source.collate([dataset[place] for place in places])


def _load(trainer: MultiModelTrainer, name: str, part: str, places: Sequence[int]) -> Batch:
    batch = _collate(trainer, name, part, places)
    return {key: value.to(trainer.device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _sample(trainer: MultiModelTrainer, answers: Callable[[Batch], Batch]) -> Batch:
    name, source = next(iter(trainer.sources.items()))
    return answers(_load(trainer, name, "train" if source.train is not None else "validation", [0]))


# The file ------------------------------------------------------------------------------------------------------------


def _open(trainer: MultiModelTrainer, path: Path | None, key: Mapping[str, Any]) -> Recording:
    """Returns what the file holds, nothing where there is none; rank 0 reads it for all."""
    read = _read(path, key) if trainer.is_main and path is not None and path.exists() else None
    read = gather(read)[0]
    if isinstance(read, str):
        raise ConfigError(read)
    if read is None:
        return Recording(digests=np.empty(0, dtype=f"S{DIGEST_BYTES}"), values=np.empty(0, np.float32), path=path)
    if trainer.is_main:
        log.info("task.cache=%s holds what the reference says of %d answers", path, len(read[0]))
    return Recording(digests=read[0], values=read[1], path=path)


def _read(path: Path, key: Mapping[str, Any]) -> tuple[Digests, np.ndarray[Any, Any]] | str:
    """Returns digests and values of a file, or in words why they are not those of this run's reference."""
    advice = "name another file, or remove it to have it recorded again"
    try:
        with safe_open(path, framework="numpy") as file:
            own = json.loads((file.metadata() or {}).get("key", "null"))
            if not isinstance(own, dict) or own.get("format") != _FORMAT:
                return f"task.cache={path}: is no recording of a reference; {advice}"
            for part, value in key.items():
                if own.get(part) != value:
                    theirs, ours = str(own.get(part))[:16], str(value)[:16]
                    return (
                        f"task.cache={path}: was recorded with other {part}, {theirs}, than models of this run start "
                        f"with, {ours}; {advice}"
                    )
            digests, values = file.get_tensor("digests"), file.get_tensor("log_probs")
    except (OSError, SafetensorError, ValueError) as error:
        return f"task.cache={path}: cannot be read ({error}); {advice}"
    return np.ascontiguousarray(digests).view(f"S{DIGEST_BYTES}").reshape(-1), values


def _write(recording: Recording, path: Path, key: Mapping[str, Any]) -> str | None:
    """Writes the file, whole or not at all; returns in words why it could not."""
    table = np.frombuffer(recording.digests.tobytes(), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"digests": table, "log_probs": recording.values}, part, metadata={"key": json.dumps(key)})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        return f"task.cache={path}: cannot be written to ({error}); name another file"
    return None
