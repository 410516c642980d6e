"""Finds the teacher's distributions of a batch in a cache, by the content of its rows."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tasks.losses import TopTokens
from tasks.teacher_cache.key import CacheKey, Reading
from tasks.teacher_cache.manifest import read_manifest
from tasks.teacher_cache.rows import Digests, describe_rows
from tasks.teacher_cache.shards import Array, Entries, Layout, damage_of, read_index, share_of
from trainer import Batch, ConfigError

_OPEN_FILES = 64


class TeacherCache:
    """A recorded teacher. A row is read from its shard and unpacked when it is asked for; the index is in memory.

    Args:
        key: What the cache is of.
        sizes: Name of each shard to its size in bytes.
    """

    def __init__(self, folder: Path, *, key: CacheKey, sizes: Mapping[str, int]) -> None:
        self.folder, self.key = folder, key
        self.layout = layout_of(key)
        self.shards = [folder / name for name in sorted(sizes)]
        self.sizes = dict(sizes)
        self._read = functools.lru_cache(maxsize=_OPEN_FILES)(_open)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="teacher-cache")

    @classmethod
    def open(cls, folder: str | Path) -> TeacherCache:
        """Returns the cache in a folder; ConfigError where there is none, or none that was finished."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest is None:
            raise ConfigError(
                f"task.cache.path={folder}: there is no teacher cache; record it with mode=cache_teacher "
                f"task.cache.path={folder}"
            )
        if not manifest.complete:
            raise ConfigError(
                f"task.cache.path={folder}: the recording was not finished; the same command with mode=cache_teacher "
                "goes on with it"
            )
        return cls(folder, key=manifest.key, sizes=manifest.shards)

    # Before step 1 ---------------------------------------------------------------------------------------------------

    def find_damage(self, *, rank: int = 0, world_size: int = 1) -> list[str]:
        """Returns what is wrong with this rank's share of the shards, each by its name; contents are read."""
        found = []
        for file in share_of(self.shards, rank=rank, world_size=world_size):
            damage = "is missing" if not file.is_file() else damage_of(file)
            if damage is not None:
                found.append(
                    f"task.cache.path={self.folder}: {file.name} {damage}; record it again: the same command with "
                    "mode=cache_teacher replaces it"
                )
        return found

    def find_problems(self, expected: Mapping[str, Any]) -> list[str]:
        """Returns each part of the key that is not as expected, with both values."""
        if "top_k" in expected:  # there are no more tokens than the vocabulary has
            expected = {**expected, "top_k": min(expected["top_k"], self.key.vocabulary)}
        hint = "record one for this run under another task.cache.path, or make the run as it was then"
        return [f"task.cache.path={self.folder}: {text}; {hint}" for text in self.key.differences(expected)]

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raises ConfigError with what `find_problems` returns."""
        problems = self.find_problems(expected)
        if problems:
            raise ConfigError(*problems)

    def check_vocabulary(self, size: int | None) -> int:
        """Returns how many of a student's first logits the cache is about; ConfigError for a student with fewer.

        Args:
            size: Of the student's logits, None where it is not known.
        """
        if size is not None and size < self.key.vocabulary:
            raise ConfigError(
                f"task.cache.path={self.folder}: the teacher's {self.key.vocabulary} logits were recorded, but the "
                f"student has {size}; record with task.cache.vocabulary=<the number of tokens that both have>"
            )
        return self.key.vocabulary

    def find_reading_problems(self, terms: Mapping[str, Reading]) -> list[str]:
        """Returns what terms need, by their name, that was not stored."""
        key, problems = self.key, []
        read = {reading.temperature for reading in terms.values() if reading.temperature is not None}
        known = ", ".join(f"{value:g}" for value in key.temperatures)
        needed = ",".join(f"{value:g}" for value in sorted({*key.temperatures, *read}))
        for name, reading in terms.items():
            if reading.temperature is not None and reading.temperature not in key.temperatures:
                problems.append(
                    f"task.terms.{name}.temperature={reading.temperature:g}: the cache has the normalisers of {known} "
                    f"only; take one of them, or record with task.cache.temperatures=[{needed}] under another "
                    "task.cache.path"
                )
            if reading.top_k is not None and reading.top_k > key.top_k:
                problems.append(
                    f"task.terms.{name}.top_k={reading.top_k}: the cache has the {key.top_k} most likely tokens of a "
                    f"position; take at most {key.top_k}, or record with task.cache.top_k={reading.top_k} under "
                    "another task.cache.path"
                )
            if key.mask not in ("all", reading.mask):
                problems.append(
                    f"task.terms.{name}.mask={reading.mask}: the cache holds the tokens of mask {key.mask} only; "
                    f"take mask={key.mask}, or record with task.cache.mask=all under another task.cache.path"
                )
        return problems

    def count_missing(self, digests: Digests) -> int:
        """Returns how many rows of these digests are not there."""
        return int((self._find(digests) < 0).sum())

    # In every step ---------------------------------------------------------------------------------------------------

    def lookup(self, batch: Batch, counted: Tensor) -> tuple[TopTokens, Tensor]:
        """Returns the teacher's distributions of the positions that count, N of them, on the batch's device.

        Args:
            counted: Which positions do, (B, T-1); their order is that of `batch["labels"][:, 1:][counted]`.

        Returns:
            The most likely tokens, and the log-probabilities of the right next tokens, (N,) float32.
        """
        return self.request(batch, counted).result()

    def request(self, batch: Batch, counted: Tensor) -> Future[tuple[TopTokens, Tensor]]:
        """Begins a `lookup` in a thread, so that the student's forward need not wait for it."""
        device, counted = batch["input_ids"].device, counted.cpu()
        rows = describe_rows(batch, mask=self.key.mask)
        if bool((counted & ~rows.kept).any()):
            raise ConfigError(
                f"task.cache.path={self.folder}: the cache holds the tokens of mask {self.key.mask} only, but a term "
                "counts others; record with task.cache.mask=all"
            )
        wanted = counted.any(-1).nonzero().squeeze(-1).tolist()
        places = self._find(rows.digests)[wanted]
        if (places < 0).any():
            raise ConfigError(
                f"task.cache.path={self.folder}: {int((places < 0).sum())} of {len(wanted)} rows of a batch are not in "
                "it; the examples change while the run goes on, and a cache needs such that do not"
            )
        chosen = [counted[row][rows.kept[row]].numpy() for row in wanted]  # of the positions of an entry
        return self._pool.submit(self._gather, places.tolist(), chosen, device)

    def _gather(self, places: list[int], chosen: list[Array], device: torch.device) -> tuple[TopTokens, Tensor]:
        parts = [self._entries(place, num_kept=len(rows))[rows] for place, rows in zip(places, chosen, strict=True)]
        return self._as_tensors(parts, device=device)

    def _entries(self, place: int, *, num_kept: int) -> Entries:
        shard, start, end, count = (int(column[place]) for column in self._table[1:])
        stream = self._read(self.shards[shard])
        try:
            if count != num_kept:
                raise ValueError(f"{count} positions, expected {num_kept}")
            return self.layout.unpack(os.pread(stream.fileno(), end - start, start), count)
        except Exception as error:
            error.add_note(f"while a row was read from {self.shards[shard]}")
            raise

    def _as_tensors(self, parts: list[Entries], *, device: torch.device) -> tuple[TopTokens, Tensor]:
        def joined(name: str, dtype: torch.dtype, width: tuple[int, ...]) -> Tensor:
            columns = [getattr(part, name) for part in parts] or [np.zeros((0, *width), dtype=np.float32)]
            return torch.from_numpy(np.concatenate(columns)).to(device).to(dtype)

        temperatures = _others(self.key)
        log_probs = joined("log_probs", torch.float32, (self.key.top_k,))
        normalisers = joined("log_normalisers", torch.float32, (len(temperatures),))
        tails = joined("log_tails", torch.float32, (len(self.key.temperatures),))
        log_tails = {value: tails[:, column] for column, value in enumerate(self.key.temperatures)}
        # The mass of the K tokens that the stored tail leaves is more precise than the sum of K rounded ones.
        log_mass = (-torch.expm1(log_tails[1.0])).log()
        log_probs = log_probs + (log_mass - torch.logsumexp(log_probs, -1)).unsqueeze(-1)
        top = TopTokens(
            ids=joined("ids", torch.int64, (self.key.top_k,)),
            log_probs=log_probs,
            log_normalisers={
                1.0: torch.zeros_like(log_mass),
                **{value: normalisers[:, column] for column, value in enumerate(temperatures)},
            },
            log_tails=log_tails,
        )
        return top, joined("label_log_probs", torch.float32, ())

    # The index -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _table(self) -> tuple[Array, Array, Array, Array, Array]:
        """Digest, shard, begin, end and number of positions of every row, in the order of the digests."""
        indices = [read_index(file) for file in self.shards]
        numbers = [np.full(len(index.digests), number) for number, index in enumerate(indices)]
        columns = [
            np.concatenate([np.zeros(0, kind), *values])
            for kind, values in (
                ("S16", [index.digests for index in indices]),
                ("<i8", numbers),
                ("<i8", [index.starts for index in indices]),
                ("<i8", [index.ends for index in indices]),
                ("<i8", [index.counts for index in indices]),
            )
        ]
        order = np.argsort(columns[0], kind="stable")
        digests, shards, starts, ends, counts = (column[order] for column in columns)
        return digests, shards, starts, ends, counts

    def _find(self, digests: Digests) -> Array:
        """Returns the place of each row in the table, -1 where it has none."""
        known = self._table[0]
        if len(known) == 0:
            return np.full(len(digests), -1)
        places = np.searchsorted(known, digests).clip(max=len(known) - 1)
        return np.where(known[places] == digests, places, -1)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._table[0])

    @property
    def num_tokens(self) -> int:
        """The number of positions of all rows."""
        return int(self._table[4].sum())


def layout_of(key: CacheKey) -> Layout:
    """Returns how wide the entries of a cache are."""
    return Layout(top_k=key.top_k, vocabulary=key.vocabulary, num_temperatures=len(_others(key)))


def _others(key: CacheKey) -> list[float]:
    """Returns the temperatures whose normaliser is not 0."""
    return [value for value in key.temperatures if value != 1]


def _open(file: Path) -> BinaryIO:
    return file.open("rb", buffering=0)
