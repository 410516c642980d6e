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

from tasks.teacher_cache.rows import DIGEST_BYTES, Digests, describe_rows, shares
from trainer import (
    Batch,
    ConfigError,
    ModelHandle,
    MultiModelTrainer,
    digest_fixed,
    digest_weights,
    gather,
    is_adapted,
    to_device,
)

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

FILE = "reference_log_probs.safetensors"
ADAPTER = "adapter"
WITHOUT_MODEL = (ADAPTER, "cached", "none")
_FORMAT = 1
_TELL_SECONDS = 10.0

Ask = Callable[[ModelHandle, Batch], Tensor]  # (a model, answers) -> log-probability of each answer or token


class Reference(Protocol):
    """Gives the log-probabilities that the reference has of the answers of a batch, as `Ask` does, without a graph."""

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


def open_reference(models: Mapping[str, ModelHandle], *, policy: str, reference: str, ask: Ask) -> Reference:
    """Returns the policy without its adapters where `reference` is ADAPTER, else the frozen model of that name."""
    if reference == ADAPTER:
        return AdapterOff(models=models, name=policy, ask=ask)
    return FrozenReference(model=models[reference], ask=ask)


def find_adapter_problems(
    reference: str | None, *, policy: str, adapted: Sequence[str], instead: str = "the name of a frozen model"
) -> list[str]:
    """Returns why a policy without adapters cannot be its own reference.

    Args:
        adapted: Names of the models with adapters.
        instead: What else `task.reference` may be.
    """
    if reference != ADAPTER or policy in adapted:
        return []
    problem = f"task.reference={ADAPTER}: models.{policy} has no adapters to switch off"
    return [f"{problem}; give models.{policy}.lora.r=8, or take {instead}"]


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
    lacking, num_recorded = _lacking(trainer, found, answers), 0
    most = sum(1 for _ in shares(trainer.sources, rank=0, world_size=1))
    began = told = time.monotonic()
    while True:
        digests, batch = next(lacking, (None, None))
        num_here = sum(gather(batch is not None))
        if not num_here:
            return
        if trainer.is_main and not num_recorded:
            log.info("recording what models.%s says of the data before training: %d batches at most", policy.name, most)
        # A rank that is done goes on, since sharded weights need all ranks.
        values = speaker.log_probs(to_device(_sample(trainer, answers) if batch is None else batch, trainer.device))
        assert values is not None
        if digests is not None:
            yield digests, values.float().cpu().numpy()
        num_recorded += num_here
        if trainer.is_main and time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            log.info("recorded %d of %d batches in %.0f s", num_recorded, most, told - began)


def _lacking(
    trainer: MultiModelTrainer, found: Recording, answers: Callable[[Batch], Batch]
) -> Iterator[tuple[Digests, Batch]]:
    """Yields the batches of this rank's share of all examples with an answer that the recording lacks."""
    for name, part, indices in shares(trainer.sources, rank=trainer.rank, world_size=trainer.world_size):
        batch = answers(trainer.sources[name].collated(part, indices))
        digests = digests_of(batch)
        if found.lacks(digests).any():
            yield digests, batch


def _sample(trainer: MultiModelTrainer, answers: Callable[[Batch], Batch]) -> Batch:
    source = next(iter(trainer.sources.values()))
    return answers(source.collated(next(iter(source.parts)), [0]))


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
