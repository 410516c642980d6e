"""Opens a cache for a run, once all that would make its numbers wrong is ruled out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tasks.teacher_cache.key import CacheOptions, Reading, check_tokens, data_parts, find_token_problems, teacher_parts
from tasks.teacher_cache.reader import TeacherCache
from tasks.teacher_cache.recording import live_entries, load_batch
from tasks.teacher_cache.rows import DIGEST_BYTES, describe_examples
from tasks.teacher_cache.shards import Array
from tasks.text.language import MASKS
from trainer import ConfigError, ModelHandle, MultiModelTrainer, gather, refuse_together

log = logging.getLogger(__name__)

# Nats between a stored and a live log-probability: float16 rounds one of -16 by 0.004, and kernels in half precision
# differ with the shape of a batch.
_TOLERANCE = {torch.float32: 0.05}
_HALF_TOLERANCE = 0.5


def find_cache_problems(options: CacheOptions, terms: Mapping[str, Reading]) -> list[str]:
    """Returns what can be said against `task.cache` before any model is built; nothing but the manifest is read.

    Args:
        terms: Name of each term to what it needs of the cache.
    """
    assert options.path is not None
    try:
        cache = TeacherCache.open(options.path)
    except ConfigError as error:
        return error.problems
    return cache.find_reading_problems(terms) + cache.find_problems(options.asked())


def open_checked(
    trainer: MultiModelTrainer, options: CacheOptions, *, terms: Mapping[str, Reading], teacher: ModelHandle | None
) -> TeacherCache:
    """Returns the cache of `task.cache`, or raises ConfigError on every rank; all ranks call it.

    Refused are a key that is not this run's, a damaged shard, examples that are missing, and terms that need more than
    was stored. Where the teacher is at hand its weights are compared, and a sample of what it says.

    Args:
        terms: Name of each term to what it needs of the cache.
    """
    assert options.path is not None
    cache = TeacherCache.open(options.path)
    expected = options.asked() | data_parts(trainer)
    if teacher is not None:
        check_tokens(trainer, teacher)
        expected |= teacher_parts(trainer, teacher)
    cache.check(expected)
    problems = cache.find_reading_problems(terms)
    problems += cache.find_damage(rank=trainer.rank, world_size=trainer.world_size)
    refuse_together(problems)
    _check_examples(trainer, cache)
    if teacher is not None:
        _check_sample(trainer, cache, teacher)
    if trainer.is_main:
        log.info(
            "task.cache.path=%s: the teacher is %s (weights %s), its %d most likely tokens of %d positions",
            cache.folder,
            cache.key.teacher,
            str(cache.key.weights)[:16],
            cache.key.top_k,
            cache.num_tokens,
        )
    return cache


def _check_examples(trainer: MultiModelTrainer, cache: TeacherCache) -> None:
    """Refuses a cache that lacks any example of the run, or one of their tokens; each rank looks at its share."""
    own: dict[str, list[bytes]] = {"train": [], "validation": []}
    largest = 0
    ranks = {"rank": trainer.rank, "world_size": trainer.world_size}
    for example in describe_examples(trainer.sources, mask=cache.key.mask, **ranks):
        own[example.part].append(example.digest)
        largest = max(largest, example.largest)
    largest = max(gather(largest))
    refuse_together(find_token_problems(trainer, vocabulary=cache.key.vocabulary, largest=largest))
    counts = {
        part: (cache.count_missing(np.array(digests, dtype=f"S{DIGEST_BYTES}")), len(digests))
        for part, digests in own.items()
    }
    problems = []
    by_rank = gather(counts)
    for part in own:
        missing, total = (sum(counts[part][column] for counts in by_rank) for column in (0, 1))
        if missing:
            problems.append(
                f"task.cache.path={cache.folder}: {missing} of {total} examples of data.{part} are not in it; record "
                "them: mode=cache_teacher with the same data under another task.cache.path"
            )
    refuse_together(problems)


def _check_sample(trainer: MultiModelTrainer, cache: TeacherCache, teacher: ModelHandle) -> None:
    """Holds what the cache says of a first batch against the teacher itself."""
    size = next(iter(trainer.sources.values())).batch_size
    examples = list(islice(describe_examples(trainer.sources, mask=cache.key.mask, rank=0, world_size=1), size))
    batch = load_batch(trainer, [example for example in examples if example.part == examples[0].part])
    counted = MASKS[cache.key.mask](batch)
    stored, labels = cache.lookup(batch, counted)
    live = live_entries(teacher, batch, counted, cache.key)
    difference = max(_distance(live.log_probs, stored.log_probs), _distance(live.label_log_probs, labels))
    tolerance = _TOLERANCE.get(teacher.dtype, _HALF_TOLERANCE)
    if not difference <= tolerance:
        raise ConfigError(
            f"task.cache.path={cache.folder}: its log-probabilities are up to {difference:.3f} nats from those of "
            f"models.{teacher.name} on a sample, more than {tolerance}; record it again"
        )
    if trainer.is_main:
        log.info("the cache is what models.%s says, within %.4f nats on a sample", teacher.name, difference)


def _distance(live: Array, stored: Tensor) -> float:
    """Returns the largest difference; two minus infinities have none."""
    other = stored.cpu().numpy()
    return float(np.where(live == other, 0, np.abs(live.astype(np.float32) - other)).max())
