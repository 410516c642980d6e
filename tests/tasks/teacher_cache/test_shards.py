"""The files: what goes in comes out, how large it is, and what is damaged is told."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from tasks.teacher_cache.shards import (
    Entries,
    Layout,
    damage_of,
    find_shards,
    read_index,
    share_of,
    write_shard,
    write_whole,
)


def make_entries(count: int, layout: Layout, *, seed: int = 0) -> Entries:
    draw = np.random.default_rng(seed)
    log_probs = -np.sort(draw.exponential(3, (count, layout.top_k)), -1)
    return Entries(
        ids=draw.integers(0, layout.vocabulary, (count, layout.top_k), dtype=np.int32),
        log_probs=log_probs.astype(np.float16),
        log_normalisers=draw.normal(size=(count, layout.num_temperatures)).astype(np.float32),
        log_tails=-draw.exponential(size=(count, layout.num_temperatures + 1)).astype(np.float32),
        label_log_probs=-draw.random(count, dtype=np.float32),
    )


@pytest.mark.parametrize("vocabulary", [61, 65_536, 65_537, 151_936])
@pytest.mark.parametrize("num_temperatures", [0, 2])
def test_entries_come_back_as_they_were(vocabulary: int, num_temperatures: int) -> None:
    layout = Layout(top_k=8, vocabulary=vocabulary, num_temperatures=num_temperatures)
    entries = make_entries(5, layout)
    entries.ids[0, :2] = [0, vocabulary - 1]

    blob = layout.pack(entries)
    found = layout.unpack(blob, 5)

    for name in ("ids", "log_probs", "log_normalisers", "log_tails", "label_log_probs"):
        assert np.array_equal(getattr(found, name), getattr(entries, name)), name
    assert len(zlib.decompress(blob)) == 5 * layout.bytes_per_token
    with pytest.raises(ValueError, match="for 4 positions"):
        layout.unpack(blob, 4)


def test_a_token_of_a_large_vocabulary_takes_less_than_400_bytes() -> None:
    one = Layout(top_k=64, vocabulary=151_936, num_temperatures=0)
    several = Layout(top_k=64, vocabulary=151_936, num_temperatures=3)

    assert one.bytes_per_token == 64 * (2 + 1 + 2) + 4 + 4
    assert several.bytes_per_token <= 400
    assert Layout(top_k=64, vocabulary=49_152, num_temperatures=0).bytes_per_token == 64 * 4 + 8


def test_a_whole_shard_with_its_index_stays_below_400_bytes_a_token(tmp_path: Path) -> None:
    layout = Layout(top_k=64, vocabulary=151_936, num_temperatures=1)
    rows = {bytes([row]) * 16: (layout.pack(make_entries(20, layout, seed=row)), 20) for row in range(10)}

    file = write_shard(tmp_path, rows)

    assert file.stat().st_size / 200 < 400  # ids drawn at random do not compress


def test_index_leads_to_the_rows(tmp_path: Path) -> None:
    layout = Layout(top_k=4, vocabulary=61, num_temperatures=0)
    rows = {bytes([row, *[0] * 15]): (layout.pack(make_entries(row, layout, seed=row)), row) for row in (3, 1, 2)}

    file = write_shard(tmp_path, rows)
    index = read_index(file)

    content = file.read_bytes()
    assert index.counts.tolist() == [3, 1, 2]
    assert index.digests.tobytes() == b"".join(rows)
    assert [content[a:b] for a, b in zip(index.starts, index.ends, strict=True)] == [blob for blob, _ in rows.values()]


def test_damage_is_found_by_the_name(tmp_path: Path) -> None:
    layout = Layout(top_k=4, vocabulary=61, num_temperatures=0)
    file = write_shard(tmp_path, {b"a" * 16: (layout.pack(make_entries(3, layout)), 3)})
    assert damage_of(file) is None

    file.write_bytes(file.read_bytes()[:-1])

    assert "its sha256 differs" in str(damage_of(file))
    file.write_bytes(b"what")
    with pytest.raises(ValueError, match="does not begin as a shard does"):
        read_index(file)


def test_half_written_files_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda self, target: None)

    write_whole(tmp_path / "a.shard", b"content")

    assert find_shards(tmp_path) == []


def test_ranks_share_all_files() -> None:
    files = [Path(name) for name in "abcde"]

    shares = [share_of(files, rank=rank, world_size=2) for rank in range(2)]

    assert sorted(shares[0] + shares[1]) == files
