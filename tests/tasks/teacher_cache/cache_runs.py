"""Recordings of tiny teachers and trainings from them, on real engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tasks.distill import DistillTask
from tasks.losses import TopTokens, forward_kl
from tasks.teacher_cache import CacheKey, TeacherCache
from tasks.teacher_cache.manifest import Manifest, read_manifest, write_manifest
from tasks.teacher_cache.rows import DIGEST_BYTES
from tasks.teacher_cache.shards import Entries, read_index
from tests.tasks.task_runs import (
    VOCABULARY,
    error_of,
    fit,
    frozen,
    shared_texts,
    shared_validation,
    texts_data,
    trained,
    zero,
)
from tests.tasks.task_runs import llama as llama
from tests.trainer.test_trainer import reset_accelerate
from trainer import MultiModelTrainer, TrainingData
from trainer.recording import cache_teacher

BATCH, TOP_K = 3, 5
KL = {"kl": {"function": "forward_kl"}}
SMALL_SHARDS = {"shard_megabytes": 0.0005}  # some rows each


def make_key(**parts: Any) -> CacheKey:
    values: dict[str, Any] = {
        "teacher": "org/large",
        "weights": "0" * 64,
        "config": None,
        "tokenizer": None,
        "template": None,
        "data": {},
        "dtype": "float32",
        "vocabulary": VOCABULARY,
        "top_k": TOP_K,
        "temperatures": (1.0,),
        "mask": "completion",
    }
    return CacheKey(**{**values, **parts})


def write_empty_cache(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, Manifest(key=make_key(), complete=True))


def make_data(*, batch_size: int = BATCH, train: int = 12, validation: int = 7) -> TrainingData:
    return texts_data(shared_texts()[:train], shared_validation()[:validation], batch_size=batch_size)


def record(
    folder: Path, *, stage: int | None = None, name: str = "teacher", data: TrainingData | None = None, **cache: Any
) -> MultiModelTrainer:
    """Records the teacher of that name, a replica or under ZeRO-3; every rank must call it."""
    reset_accelerate()
    options = {"top_k": TOP_K, "temperatures": [1.0], "mask": "completion", "path": str(folder), **cache}
    task = DistillTask(terms=KL, cache=options)
    trainer = MultiModelTrainer({"teacher": {"replicate": True} if stage is None else zero(stage)}, max_steps=1)
    cache_teacher(trainer, task, models={"teacher": frozen(name)}, data=data or make_data())
    return trainer


def train(
    folder: Path | None,
    *,
    teacher: str | None = None,
    terms: Mapping[str, Any] = KL,
    data: TrainingData | None = None,
    cache: Mapping[str, Any] | None = None,
    steps: int = 3,
) -> tuple[MultiModelTrainer, dict[str, Any]]:
    """Trains from a cache, from a teacher (its name), or from the cache with the teacher at hand."""
    models, plugins = {"student": trained(llama, "student")}, {"student": zero(1)}
    if teacher is not None:
        models["teacher"], plugins["teacher"] = frozen(teacher), {"replicate": True}
    given = None if folder is None else {"path": str(folder), **(cache or {})}
    task = DistillTask(terms=terms, cache=given, preflight={"teacher_is_trained": False})
    return fit(task, models, plugins, data or make_data(), steps=steps)


def truncated_kl(student: Tensor, teacher: Tensor | TopTokens, labels: Tensor, *, temperature: float) -> Tensor:
    """The term that reads a live teacher as the cache does."""
    if isinstance(teacher, Tensor):
        teacher = TopTokens.from_logits(teacher, k=TOP_K, temperatures=[temperature])
    return forward_kl(student, teacher, temperature=temperature)


def content_of(folder: Path) -> dict[bytes, Entries]:
    """Returns the rows of a cache by their digest."""
    cache = TeacherCache.open(folder)
    rows = {}
    for file in cache.shards:
        index, content = read_index(file), file.read_bytes()
        raw = index.digests.tobytes()
        for row, (start, end, count) in enumerate(zip(index.starts, index.ends, index.counts, strict=True)):
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            rows[digest] = cache.layout.unpack(content[start:end], int(count))
    return rows


def distance(one: Mapping[bytes, Entries], other: Mapping[bytes, Entries]) -> float:
    """Returns the largest difference between two caches of the same rows."""
    assert one.keys() == other.keys()
    return max(
        float(np.abs(left.astype(np.float64) - right).max(initial=0))
        for digest in one
        for left, right in zip(asdict(one[digest]).values(), asdict(other[digest]).values(), strict=True)
    )


# On several ranks ----------------------------------------------------------------------------------------------------


def run_two(folder: Path) -> dict[str, Any]:
    """Records on two ranks under ZeRO-3, and trains from it; then from one that lacks rows, and from a damaged one."""
    record(folder / "two", stage=3, **SMALL_SHARDS)
    record(folder / "few", data=make_data(train=9, validation=7))
    two, few = (read_manifest(folder / name) for name in ("two", "few"))
    assert two is not None and few is not None
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        key = replace(few.key, data=two.key.data)
        write_manifest(folder / "few", Manifest(key=key, complete=True, shards=few.shards))
    torch.distributed.barrier()
    found = train(folder / "two")[1]
    return {
        "steps": found["steps"],
        "models": list(found["weights"]),
        "missing": error_of(lambda: train(folder / "few")),
    }


def run_killed(folder: Path) -> None:
    """Is killed while the third shard is on its way to the disk."""
    written = []
    genuine = Path.replace

    def replace_or_die(self: Path, target: Path) -> Path:
        if target.suffix == ".shard":
            written.append(target)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return genuine(self, target)

    with mock.patch.object(Path, "replace", replace_or_die):
        record(folder, **SMALL_SHARDS)
