"""The file that says what a cache is of and which shards are its own; nothing in it is believed unseen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.teacher_cache.key import CacheKey
from tasks.teacher_cache.shards import SUFFIX, write_whole
from trainer import ConfigError

MANIFEST, FORMAT = "manifest.json", 2


@dataclass(kw_only=True, frozen=True)
class Manifest:
    """What the file holds, besides its format and the digest of the key.

    Args:
        complete: Whether the recording came to its end.
        shards: Name of each to its size in bytes; none before the end.
    """

    key: CacheKey
    complete: bool
    shards: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        return {
            "format": FORMAT,
            "complete": self.complete,
            "key": self.key.as_json(),
            "key_sha256": self.key.digest(),
            "shards": dict(self.shards),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Manifest:
        """Returns what was written; raises KeyError, TypeError or ValueError for anything else."""
        key, complete, shards = CacheKey.from_json(content["key"]), content["complete"], content["shards"]
        if key.digest() != content["key_sha256"]:
            raise ValueError("the key is not the one that was written: its sha256 differs")
        if not isinstance(complete, bool):
            raise TypeError(f"complete is {complete!r}, no truth value")
        if not isinstance(shards, dict):
            raise TypeError(f"shards is a {type(shards).__name__}, no mapping")
        for name, size in shards.items():
            if name != Path(name).name or not name.endswith(SUFFIX):
                raise ValueError(f"{name!r} is not the name of a shard")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise TypeError(f"the size of {name} is {size!r}, no number of bytes")
        return cls(key=key, complete=complete, shards=shards)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of the cache in a folder, in one piece."""
    write_whole(folder / MANIFEST, (json.dumps(manifest.as_json(), indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a cache, None where there is none; ConfigError where it is no cache's, or damaged."""
    file = folder / MANIFEST
    try:
        if not file.is_file():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        is_known = content["format"] == FORMAT
        manifest = Manifest.from_json(content) if is_known else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"task.cache.path={folder}: {MANIFEST} is not that of a teacher cache ({error!r}); name another folder, or "
            "delete that one and record again"
        ) from error
    if manifest is None:
        raise ConfigError(
            f"task.cache.path={folder}: {MANIFEST} is of format {content['format']!r}, this release reads {FORMAT}; "
            "record again under another task.cache.path"
        )
    return manifest
