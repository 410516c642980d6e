"""Records a teacher: each example once, over all ranks, so that a recording that ended early can go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from tasks.losses import TopTokens, cross_entropy
from tasks.teacher_cache.key import CacheKey, CacheOptions, check_tokens, find_token_problems, make_key
from tasks.teacher_cache.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from tasks.teacher_cache.reader import TeacherCache, layout_of
from tasks.teacher_cache.rows import Example, describe_examples
from tasks.teacher_cache.shards import (
    Entries,
    Layout,
    damage_of,
    find_shards,
    read_index,
    share_of,
    write_shard,
)
from tasks.text.language import MASKS, counted_logits, next_tokens
from trainer import Batch, ConfigError, ModelHandle, MultiModelTrainer, gather, refuse_together, to_device

log = logging.getLogger(__name__)

_TILE_ELEMENTS = 1 << 24  # of the log-probabilities that are there at a time
_FLUSH_SECONDS = 300.0  # what a recording that is killed may lose
_TELL_SECONDS = 10.0
_LOCK = ".lock"


def find_recording_problems(options: CacheOptions, *, teacher: str) -> list[str]:
    """Returns the options that would say something of a recording but have no part in it."""
    own = {"dtype": f"models.{teacher}.dtype", "teacher": f"models.{teacher}.build.name"}
    return [
        f"task.cache.{option}={getattr(options, option)}: says what a cache that is read must be of, and "
        f"mode=cache_teacher records by {setting}; set that, and drop task.cache.{option}"
        for option, setting in own.items()
        if getattr(options, option) is not None
    ]


def record(
    trainer: MultiModelTrainer, teacher: ModelHandle, options: CacheOptions, *, vocabulary: int | None
) -> TeacherCache:
    """Records the teacher's distributions of all examples that the cache lacks, and returns it; all ranks call it.

    Args:
        vocabulary: How many logits the teacher has, None where its configuration does not say.
    """
    assert options.path is not None
    check_tokens(trainer, teacher)
    vocabulary = _logits_to_record(options.vocabulary, vocabulary)
    folder, began = Path(options.path), time.monotonic()
    key = make_key(trainer, teacher, options, vocabulary=vocabulary)
    lock = _claim(trainer, folder)
    try:
        known = _go_on(trainer, folder, key)
        batches = list(_batches(trainer, key))
        largest = max((example.largest for batch in batches for example in batch), default=0)
        refuse_together(find_token_problems(trainer, vocabulary=vocabulary, largest=largest))
        todo = [batch for batch in batches if any(example.digest not in known for example in batch)]
        if trainer.is_main:
            num_known = f", {len(known)} rows are there already" if known else ""
            log.info("recording %d batches of %d%s", len(todo), len(batches), num_known)
            if todo:
                write_manifest(folder, Manifest(key=key, complete=False))
        writer = Writer(folder, layout_of(key), max_bytes=int(options.shard_megabytes * 1e6))
        try:
            _record(trainer, teacher, key, todo, writer, known=known)
        finally:  # also of a recording that is interrupted
            writer.flush()
        wanted = {example.digest for batch in batches for example in batch}
        return _finish(trainer, folder, key, writer, wanted=wanted, seconds=time.monotonic() - began)
    finally:
        if lock is not None:
            lock.release()


def _logits_to_record(asked: int | None, known: int | None) -> int:
    if asked is None and known is None:
        raise ConfigError(
            "task.cache.vocabulary is missing: the teacher is not transformers'; give its number of logits"
        )
    if asked is not None and known is not None and asked > known:
        raise ConfigError(f"task.cache.vocabulary={asked}: the teacher has {known} logits")
    return min(value for value in (asked, known) if value is not None)


# What is there -------------------------------------------------------------------------------------------------------


def _claim(trainer: MultiModelTrainer, folder: Path) -> FileLock | None:
    """Returns the lock of the folder, on rank 0, once the folder is known to be a cache's or empty."""
    lock, problems = None, []
    if trainer.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(path.name != _LOCK for path in folder.iterdir()) and not (folder / MANIFEST).is_file():
                raise ConfigError(f"task.cache.path={folder}: holds other files than a cache's; name another folder")
            lock = FileLock(folder / _LOCK)
            lock.acquire(blocking=False)
        except Timeout:
            problems = [
                f"task.cache.path={folder}: another run records there; wait for its end, or name another folder"
            ]
        except OSError as error:
            problems = [f"task.cache.path={folder}: cannot be written to ({error}); name another folder"]
        except ConfigError as error:
            problems = error.problems
    refuse_together(problems)
    return lock


def _go_on(trainer: MultiModelTrainer, folder: Path, key: CacheKey) -> set[bytes]:
    """Returns the rows that whole shards hold already, once the key is known to be theirs; the other files are gone."""
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            differences = manifest.key.differences(asdict(key))
            hint = "give another task.cache.path, or delete that folder"
            problems = [f"task.cache.path={folder}: {text}; {hint}" for text in differences]
    except ConfigError as error:
        problems = error.problems
    refuse_together(problems)
    files = find_shards(folder)
    share = share_of(files, rank=trainer.rank, world_size=trainer.world_size)
    damaged = {file for theirs in gather([file for file in share if damage_of(file) is not None]) for file in theirs}
    if trainer.is_main:
        for file in damaged:
            log.warning("%s does not hold what was written; it is deleted and recorded again", file)
            file.unlink()
        for file in folder.glob(".*.part"):
            file.unlink()
    gather(None)  # nobody writes before that
    return {digest for file in files if file not in damaged for digest in _digests_of(file)}


def _digests_of(file: Path) -> Iterator[bytes]:
    digests = read_index(file).digests
    raw, size = digests.tobytes(), digests.dtype.itemsize
    return (raw[start : start + size] for start in range(0, len(raw), size))


# The work ------------------------------------------------------------------------------------------------------------


def _batches(trainer: MultiModelTrainer, key: CacheKey) -> Iterator[list[Example]]:
    """Yields all examples in batches, each content once; the same on every rank, and for any number of ranks."""
    own = describe_examples(trainer.sources, mask=key.mask, rank=trainer.rank, world_size=trainer.world_size)
    places = list(trainer.sources)
    examples = [example for theirs in gather(list(own)) for example in theirs]
    examples.sort(key=lambda example: (places.index(example.source), example.part, example.index))
    unique = {example.digest: example for example in reversed(examples)}
    ordered = [example for example in examples if unique[example.digest] is example]
    for (source, _), group in groupby(ordered, key=lambda example: (example.source, example.part)):
        members, size = list(group), trainer.sources[source].batch_size
        yield from (members[start : start + size] for start in range(0, len(members), size))


@dataclass
class Writer:
    """Collects packed rows, and closes a shard when enough are there."""

    folder: Path
    layout: Layout
    max_bytes: int
    num_tokens: int = 0  # of this recording
    rows: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    num_bytes: int = 0
    flushed: float = field(default_factory=time.monotonic)

    def add(self, digest: bytes, entries: Entries) -> None:
        """Takes a row."""
        blob = self.layout.pack(entries)
        self.rows[digest] = (blob, len(entries))
        self.num_tokens += len(entries)
        self.num_bytes += len(blob)
        if self.num_bytes >= self.max_bytes or time.monotonic() - self.flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what is there as a shard."""
        if self.rows:
            write_shard(self.folder, self.rows)
        self.rows, self.num_bytes, self.flushed = {}, 0, time.monotonic()


def _record(
    trainer: MultiModelTrainer,
    teacher: ModelHandle,
    key: CacheKey,
    todo: list[list[Example]],
    writer: Writer,
    *,
    known: set[bytes],
) -> None:
    told = time.monotonic()
    for step in range(0, len(todo), trainer.world_size):
        place = step + trainer.rank
        # A rank without a batch helps the others to gather sharded weights.
        examples = todo[min(place, len(todo) - 1)]
        rows = list(_entries_of(trainer, teacher, key, examples))
        if place < len(todo):
            for example, entries in zip(examples, rows, strict=True):
                if example.digest not in known:
                    writer.add(example.digest, entries)
        if time.monotonic() - told > _TELL_SECONDS and trainer.is_main:
            told = time.monotonic()
            log.info("recorded %d of %d batches", min(step + trainer.world_size, len(todo)), len(todo))


def _entries_of(
    trainer: MultiModelTrainer, teacher: ModelHandle, key: CacheKey, examples: Sequence[Example]
) -> Iterator[Entries]:
    """Yields the entries of each example of a batch."""
    batch = load_batch(trainer, examples)
    kept = MASKS[key.mask](batch)
    entries = live_entries(teacher, batch, kept, key)
    if np.isnan(entries.log_probs).any() or np.isnan(entries.label_log_probs).any():
        raise RuntimeError(
            f"the logits of models.{teacher.name} are NaN for examples {[example.index for example in examples]} of "
            f"data.{examples[0].part}; nothing can be learnt from them"
        )
    start = 0
    for count in kept.sum(-1).tolist():
        yield entries[start : start + count]
        start += count


def load_batch(trainer: MultiModelTrainer, examples: Sequence[Example]) -> Batch:
    """Returns examples of one set, collated and on the trainer's device."""
    first = examples[0]
    batch = trainer.sources[first.source].collated(first.part, [example.index for example in examples])
    return to_device(batch, trainer.device)


@torch.no_grad()
def live_entries(teacher: ModelHandle, batch: Batch, counted: Tensor, key: CacheKey) -> Entries:
    """Returns what a cache stores of the positions that count, N of them, from the teacher itself.

    Args:
        counted: (B, T-1) bool.
    """
    counted = counted.to(batch["input_ids"].device)
    logits = counted_logits(teacher, batch, counted, vocabulary=key.vocabulary)
    labels = next_tokens(batch, counted)
    size = max(1, _TILE_ELEMENTS // key.vocabulary)
    tiles = [
        summarise(logits[start : start + size], labels[start : start + size], key)
        for start in range(0, len(logits), size)
    ]
    columns = [np.concatenate(column) for column in zip(*(asdict(tile).values() for tile in tiles), strict=True)]
    return Entries(**dict(zip(asdict(tiles[0]), columns, strict=True)))


def summarise(logits: Tensor, labels: Tensor, key: CacheKey) -> Entries:
    """Returns what is stored of logits, (N, V) in float32, and the right next tokens, (N,)."""
    top = TopTokens.from_logits(logits, k=key.top_k, temperatures=key.temperatures)
    others = [top.log_normalisers[value] for value in key.temperatures if value != 1]
    return Entries(
        ids=top.ids.to(torch.int32).cpu().numpy(),
        log_probs=top.log_probs.to(torch.float16).cpu().numpy(),
        log_normalisers=torch.stack(others, -1).cpu().numpy() if others else np.zeros((len(logits), 0), np.float32),
        log_tails=torch.stack([top.log_tails[value] for value in key.temperatures], -1).cpu().numpy(),
        label_log_probs=-cross_entropy(logits, labels).cpu().numpy(),
    )


# The end -------------------------------------------------------------------------------------------------------------


def _finish(
    trainer: MultiModelTrainer, folder: Path, key: CacheKey, writer: Writer, *, wanted: set[bytes], seconds: float
) -> TeacherCache:
    """Makes the recording a cache, and tells its size."""
    num_new = sum(gather(writer.num_tokens))  # and all shards are written
    if trainer.is_main:
        found = {digest for file in find_shards(folder) for digest in _digests_of(file)}
        if missing := wanted - found:
            raise RuntimeError(
                f"{len(missing)} rows of other ranks are not in {folder}: all ranks must write to one file system"
            )
        sizes = {file.name: file.stat().st_size for file in find_shards(folder)}
        write_manifest(folder, Manifest(key=key, complete=True, shards=sizes))
    gather(None)
    cache = TeacherCache.open(folder)
    if trainer.is_main:
        _tell_size(trainer, cache, num_new=num_new, seconds=seconds)
    return cache


def _tell_size(trainer: MultiModelTrainer, cache: TeacherCache, *, num_new: int, seconds: float) -> None:
    on_disk, num_tokens, raw = sum(cache.sizes.values()), max(1, cache.num_tokens), cache.layout.bytes_per_token
    log.info(
        "teacher cache %s: %d tokens in %d rows and %d files, %.1f bytes per token (%d before compression: ratio "
        "%.2f); recorded %d tokens in %.1f s, %.0f tokens/s",
        cache.folder,
        cache.num_tokens,
        cache.num_rows,
        len(cache.shards),
        on_disk / num_tokens,
        raw,
        raw * num_tokens / max(1, on_disk),
        num_new,
        seconds,
        num_new / seconds,
    )
    metrics = {
        "cache/tokens": float(cache.num_tokens),
        "cache/bytes_per_token": on_disk / num_tokens,
        "cache/raw_bytes_per_token": float(raw),
        "cache/tokens_per_s": num_new / seconds,
    }
    trainer.log_metrics(metrics, step=0)
