"""The files of a cache: rows of tokens, each compressed by itself, in shards that are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tasks.teacher_cache.rows import DIGEST_BYTES, Digests

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"TEACHER1"
SUFFIX = ".shard"  # after the sha256 of the content
_LEVEL = 6  # of zlib
_WIDE = 1 << 16  # from so many tokens on an id takes a third byte


@dataclass(kw_only=True, frozen=True)
class Entries:
    """What is stored of N positions.

    Args:
        ids: Of the K most likely tokens, the likeliest first, (N, K) int32.
        log_probs: At temperature 1, (N, K) float16, whose relative precision is the better of the half formats.
        log_normalisers: log sum p^(1/T) over the vocabulary, one column for each temperature but 1, (N, C) float32.
        log_tails: Log of the mass of all other tokens, one column for each temperature, (N, C + 1) float32.
        label_log_probs: Of the right next token, (N,) float32.
    """

    ids: Array
    log_probs: Array
    log_normalisers: Array
    log_tails: Array
    label_log_probs: Array

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice | Array) -> Entries:
        return Entries(**{name: getattr(self, name)[rows] for name in _FIELDS})


_FIELDS = ("ids", "log_probs", "log_normalisers", "log_tails", "label_log_probs")


@dataclass(kw_only=True, frozen=True)
class Layout:
    """How wide an entry is: K tokens out of a vocabulary, and so many temperatures besides 1."""

    top_k: int
    vocabulary: int
    num_temperatures: int

    @property
    def bytes_per_token(self) -> int:
        """The size of one position before compression."""
        return sum(np.dtype(kind).itemsize * width for kind, width in self._columns())

    def _columns(self) -> list[tuple[str, int]]:
        wide = [("u1", self.top_k)] if self.vocabulary > _WIDE else []
        others = self.num_temperatures
        return [("<u2", self.top_k), *wide, ("<f2", self.top_k), ("<f4", others), ("<f4", others + 1), ("<f4", 1)]

    def pack(self, entries: Entries) -> bytes:
        """Returns the entries of one row, compressed."""
        columns = [entries.ids & 0xFFFF, *([entries.ids >> 16] if self.vocabulary > _WIDE else []), entries.log_probs]
        columns += [entries.log_normalisers, entries.log_tails, entries.label_log_probs[:, None]]
        planes = [_planes(column.astype(kind)) for column, (kind, _) in zip(columns, self._columns(), strict=True)]
        return zlib.compress(b"".join(planes), _LEVEL)

    def unpack(self, blob: bytes, count: int) -> Entries:
        """Returns the entries of one row; raises ValueError where they are not so many."""
        raw = zlib.decompress(blob)
        if len(raw) != count * self.bytes_per_token:
            raise ValueError(f"{len(raw)} bytes for {count} positions of {self.bytes_per_token}")
        columns, start = [], 0
        for kind, width in self._columns():
            size = np.dtype(kind).itemsize * width * count
            columns.append(_from_planes(raw[start : start + size], kind).reshape(count, width))
            start += size
        low, *high, log_probs, normalisers, tails, labels = columns
        ids = low.astype(np.int32)
        if high:
            ids |= high[0].astype(np.int32) << 16
        return Entries(
            ids=ids,
            log_probs=log_probs,
            log_normalisers=normalisers,
            log_tails=tails,
            label_log_probs=labels[:, 0],
        )


def _planes(values: Array) -> bytes:
    """Returns all first bytes, then all second ones: those of similar numbers are alike, and compress."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(raw: bytes, kind: str) -> Array:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(np.frombuffer(raw, dtype=np.uint8).reshape(size, -1).T).view(kind)


# Files ---------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True)
class Index:
    """Where the rows of a shard lie in its file, (rows,) each: begin and end in bytes, and numbers of positions."""

    digests: Digests
    starts: Array
    ends: Array
    counts: Array


def shard_content(rows: Mapping[bytes, tuple[bytes, int]]) -> bytes:
    """Returns the content of a shard: by digest a row's packed entries and their number."""
    blobs = [blob for blob, _ in rows.values()]
    counts = np.array([count for _, count in rows.values()], dtype="<u4")
    ends = np.cumsum([len(blob) for blob in blobs], dtype="<u8")
    head = json.dumps({"rows": len(rows), "tokens": int(counts.sum())}).encode()
    return b"".join(
        [MAGIC, len(head).to_bytes(4, "little"), head, *rows.keys(), counts.tobytes(), ends.tobytes(), *blobs]
    )


def read_index(file: Path) -> Index:
    """Returns the index of a shard; raises ValueError for what is none."""
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin as a shard does")
        head_bytes = int.from_bytes(stream.read(4), "little")
        num_rows = int(json.loads(stream.read(head_bytes))["rows"])
        table = stream.read(num_rows * (DIGEST_BYTES + 4 + 8))
    if len(table) != num_rows * (DIGEST_BYTES + 4 + 8):
        raise ValueError("it is cut off")
    digests = np.frombuffer(table, dtype=f"S{DIGEST_BYTES}", count=num_rows)
    counts = np.frombuffer(table, dtype="<u4", count=num_rows, offset=num_rows * DIGEST_BYTES)
    first = len(MAGIC) + 4 + head_bytes + len(table)
    ends = np.frombuffer(table, dtype="<u8", count=num_rows, offset=num_rows * (DIGEST_BYTES + 4)).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return Index(digests=digests, starts=starts + first, ends=ends + first, counts=counts.astype(np.int64))


def write_shard(folder: Path, rows: Mapping[bytes, tuple[bytes, int]]) -> Path:
    """Writes a shard in one piece, under the digest of its content, and returns its file."""
    content = shard_content(rows)
    file = folder / f"{hashlib.sha256(content).hexdigest()}{SUFFIX}"
    write_whole(file, content)
    return file


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file so that it is there with all of its content, also after a loss of power, or not at all."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_shards(folder: Path) -> list[Path]:
    """Returns the shards in a folder, half-written ones left out."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def damage_of(file: Path) -> str | None:
    """Returns what is wrong with a shard: its name is the sha256 that its content must have."""
    try:
        with file.open("rb", buffering=0) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == file.name.removesuffix(SUFFIX) else "does not hold what was written (its sha256 differs)"


def share_of(files: Sequence[Path], *, rank: int, world_size: int) -> list[Path]:
    """Returns the files that a rank looks at where all share the work."""
    return list(files[rank::world_size])
