"""The manifest of a cache: believed only where it is what was written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.teacher_cache import TeacherCache, find_cache_problems, parse_options
from tasks.teacher_cache.manifest import FORMAT, MANIFEST, Manifest, read_manifest, write_manifest
from tests.tasks.teacher_cache.cache_runs import make_key
from trainer import ConfigError

SHARD = "0.shard"


def write(folder: Path, **changes: Any) -> None:
    """Writes a manifest with other parts, those of the key by `key_<part>`, and the digest that belongs to them."""
    key = {**make_key().as_json(), **{part[4:]: changes.pop(part) for part in [*changes] if part.startswith("key_")}}
    content = Manifest(key=make_key(), complete=True, shards={SHARD: 1}).as_json()
    (folder / MANIFEST).write_text(json.dumps({**content, "key": key, **changes}), encoding="utf-8")


def test_manifest_comes_back(tmp_path: Path) -> None:
    manifest = Manifest(key=make_key(temperatures=(0.5, 1.0)), complete=False, shards={SHARD: 7})
    write_manifest(tmp_path, manifest)

    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [SHARD]},
        {"shards": {"../../x.shard": 1}},
        {"shards": {SHARD: "1"}},
        {"complete": 1},
        {"key": []},
        {"key_top_k": 0},
        {"key_top_k": "64"},
        {"key_top_k": 62},
        {"key_vocabulary": True},
        {"key_data": None},
        {"key_data": {"data.train": {"examples": 3}}},
        {"key_temperatures": [2.0]},
        {"key_temperatures": [10**400]},
        {"key_mask": "prompt"},
        {"key_weights": 3},
        {"key_unheard_of": 3},
    ],
    ids=str,
)
def test_damaged_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, **changes)

    with pytest.raises(ConfigError, match="is not that of a teacher cache") as refused:
        TeacherCache.open(tmp_path)
    assert "sha256" not in str(refused.value)  # the digest would find it too, and say less


@pytest.mark.parametrize("changes", [{"key_top_k": 4}, {"key_vocabulary": 60}, {"key_dtype": "bfloat16"}], ids=str)
def test_edited_key_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, **changes)

    with pytest.raises(ConfigError, match="its sha256 differs"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", "null"])
def test_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)

    with pytest.raises(ConfigError, match="is not that of a teacher cache"):
        read_manifest(tmp_path)


def test_other_format_is_named(tmp_path: Path) -> None:
    write(tmp_path, format=1)

    with pytest.raises(ConfigError, match=f"is of format 1, this release reads {FORMAT}; record again"):
        read_manifest(tmp_path)


def test_name_that_no_file_may_have_is_refused() -> None:
    (problem,) = find_cache_problems(parse_options({"path": "x" * 300}), {})

    assert "File name too long" in problem
