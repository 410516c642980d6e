"""Slices on disk are read in any cut exactly; a file that lies about them, or is none, is refused and never run."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.saving import slices
from trainer.saving.checkpoints import CheckpointError, describe_files, find_damage, read_json, stage
from trainer.saving.checkpoints import commit as commit_checkpoint
from trainer.saving.slices import SliceReader, write_slices

KEY = "weight/net.0.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def write_ranks(folder: Path, whole: dict[str, Tensor], cuts: dict[str, list[int]], ranks: int) -> list[Path]:
    """Writes flat tensors in stretches that end at the cuts, each by one of the ranks."""
    shares: list[tuple[dict[str, Tensor], dict[str, int]]] = [({}, {}) for _ in range(ranks)]
    for key, value in whole.items():
        bounds = [0, *cuts[key], value.numel()]
        for rank, (low, high) in enumerate(itertools.pairwise(bounds)):
            tensors, starts = shares[rank]
            tensors[key], starts[key] = value[low:high], low
    names = [
        name
        for rank, (tensors, starts) in enumerate(shares)
        for name in write_slices(folder, f"rank-{rank:05d}", tensors, starts)
    ]
    return [folder / name for name in names]


@pytest.mark.parametrize("seed", range(20))
def test_any_stretch_is_read_from_any_cut(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    ranks = draw.randint(1, 5)
    monkeypatch.setattr(slices, "FILE_BYTES", draw.choice([1, 40, 1 << 30]))
    whole = {
        f"state/key/weight.{index}": torch.randn(draw.randint(1, 40)).mul(3).to(draw.choice(DTYPES))
        for index in range(4)
    }
    cuts = {key: sorted(draw.randint(0, value.numel()) for _ in range(ranks - 1)) for key, value in whole.items()}

    with SliceReader(draw.sample(files := write_ranks(tmp_path, whole, cuts, ranks), len(files))) as reader:
        for key, value in whole.items():
            for _ in range(10):
                low = draw.randint(0, value.numel())
                high = draw.randint(low, value.numel())
                target = torch.zeros(high - low, dtype=value.dtype)
                reader.fill(target, key, start=low)

                assert torch.equal(target, value[low:high]) and reader.dtype_of(key) == value.dtype


def test_large_parts_go_into_files_of_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slices, "FILE_BYTES", 100)
    tensors = {f"weight/{index}": torch.arange(10.0) + index for index in range(5)}  # 40 bytes each
    tensors["weight/large"] = torch.zeros(100)

    names = write_slices(tmp_path, "rank-00000", tensors, dict.fromkeys(tensors, 0))

    assert names == [f"rank-00000-{number:03d}.safetensors" for number in range(4)]
    with SliceReader([tmp_path / name for name in names]) as reader:
        assert all(torch.equal(reader.read(key), value) for key, value in tensors.items())


def test_a_rank_without_tensors_writes_a_file_that_holds_none(tmp_path: Path):
    (name,) = write_slices(tmp_path, "rank-00000", {}, {})

    with SliceReader([tmp_path / name]) as reader:
        assert reader.keys_of("state", "weight") == []
        reader.fill(torch.empty(0), KEY, start=0)
        with pytest.raises(CheckpointError, match="holds 0 of the 1"):
            reader.fill(torch.empty(1), KEY, start=0)


def test_views_of_one_storage_and_what_is_not_contiguous_are_written_as_they_look(tmp_path: Path):
    storage = torch.arange(24.0)
    image = storage.reshape(1, 2, 3, 4)
    tensors = {
        "whole/a": storage, "whole/same": storage, "whole/inner": storage[3:9], "whole/last": storage[8:],
        "whole/turned": storage.reshape(4, 6).T, "whole/every_other": storage[::2], "whole/empty": storage[:0],
        "whole/image": image.contiguous(memory_format=torch.channels_last), "whole/number": storage[5],
        "whole/expanded": storage[:1].expand(4),
    }  # fmt: skip

    (name,) = write_slices(tmp_path, "rank-00000", tensors, {})

    with SliceReader([tmp_path / name]) as reader:
        for key, value in tensors.items():
            assert torch.equal(reader.read(key), value) and reader.read(key).shape == value.shape, key


def test_views_that_lie_side_by_side_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flat = torch.arange(10.0)
    written: list[dict[str, Tensor]] = []
    monkeypatch.setattr(slices, "save_file", lambda part, *_, **__: written.append(part))

    write_slices(tmp_path, "rank-00000", {"b": flat[4:], "a": flat[:4]}, {})

    assert {key: value.data_ptr() for key, value in written[0].items()} == {
        "a": flat.data_ptr(),
        "b": flat.data_ptr() + 16,
    }


def test_the_state_of_a_weight_is_found_by_its_name(tmp_path: Path):
    tensors = {f"{kind}/{name}": torch.zeros(2) for kind in ("weight", "state/exp_avg", "state/sq", "whole/row")
               for name in ("net.0", "net.a/b")}  # fmt: skip
    (name,) = write_slices(tmp_path, "rank-00000", tensors, {})

    with SliceReader([tmp_path / name]) as reader:
        for weight in ("net.0", "net.a/b"):
            assert sorted(reader.keys_of("state", weight)) == ["exp_avg", "sq"]
            assert reader.keys_of("whole", weight) == ["row"]
            assert reader.keys_of("state", weight[1:]) == []


def test_values_are_converted_to_the_type_of_the_target(tmp_path: Path):
    (name,) = write_slices(tmp_path, "rank-00000", {KEY: torch.tensor([0.1, 1.0])}, {KEY: 0})
    target = torch.empty(2, dtype=torch.bfloat16)

    with SliceReader([tmp_path / name]) as reader:
        reader.fill(target, KEY, start=0)

    assert torch.equal(target, torch.tensor([0.1, 1.0]).bfloat16())


# Files that lie


def read_all(files: list[Path], numel: int) -> Tensor:
    target = torch.full((numel,), -1.0)
    with SliceReader(files) as reader:
        reader.fill(target, KEY, start=0)
    return target


def parts_of(folder: Path, *parts: tuple[int, int]) -> list[Path]:
    """Writes slices (start, number of elements) of one weight."""
    found = []
    for rank, (start, numel) in enumerate(parts):
        (name,) = write_slices(
            folder, f"rank-{rank:05d}", {KEY: torch.arange(start, start + numel).float()}, {KEY: start}
        )
        found.append(folder / name)
    return found


def test_slices_that_follow_one_another_make_the_weight(tmp_path: Path):
    assert torch.equal(read_all(parts_of(tmp_path, (6, 2), (0, 2), (2, 4), (8, 5)), 10), torch.arange(10.0))


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 5)], [(5, 5)], [(0, 4), (5, 5)], [(0, 0), (100, 10)],
        [(0, 5), (3, 5)],  # ten elements in all, but two are never filled
        [(0, 10), (0, 10)], [(0, 10), (4, 1)], [],
    ],
    ids=repr,
)  # fmt: skip
def test_slices_with_gaps_and_overlaps_are_refused(parts: list[tuple[int, int]], tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"net\.0\.weight"):
        read_all(parts_of(tmp_path, *parts), 10)


@pytest.mark.parametrize(
    "starts",
    ["{", "[]", "null", "3", "", "[" * 100_000, '{"weight/net.0.weight": -5}', '{"weight/net.0.weight": "0"}',
     '{"weight/net.0.weight": 0.5}', '{"weight/net.0.weight": null}', '{"weight/net.0.weight": true}',
     '{"weight/net.0.weight": NaN}', '{"weight/net.0.weight": 100000000000000000000000000}'],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_starts_that_are_no_places_are_refused(starts: str, tmp_path: Path):
    save_file({KEY: torch.zeros(10)}, tmp_path / "a.safetensors", metadata={"starts": starts})

    with pytest.raises(CheckpointError):
        read_all([tmp_path / "a.safetensors"], 10)


@pytest.mark.parametrize("shape", [(1, 10), (10, 1), (2, 5), (1, 1, 10)])
def test_a_slice_that_is_not_flat_is_refused(shape: tuple[int, ...], tmp_path: Path):
    save_file({KEY: torch.zeros(shape)}, tmp_path / "a.safetensors")

    with pytest.raises(CheckpointError):
        read_all([tmp_path / "a.safetensors"], 10)


def test_a_tensor_that_is_not_there_is_a_checkpoint_error(tmp_path: Path):
    with SliceReader(parts_of(tmp_path, (0, 1))) as reader:
        for ask in (reader.read, reader.dtype_of):
            with pytest.raises(CheckpointError, match="does not hold whole/row/x"):
                ask("whole/row/x")


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE = {
    "empty": b"",
    "short": b"\x08",
    "header longer than the file": struct.pack("<Q", 1 << 62) + b"{}",
    "header of 2^64 - 1": b"\xff" * 16,
    "no JSON": raw(b"{{{{"),
    "deep JSON": raw(b"[" * 100_000),
    "deep objects": raw(b'{"a":' * 100_000),
    "offsets beyond the file": raw({KEY: entry([10], [0, 40])}, b"\0" * 8),
    "offsets that turn back": raw({KEY: entry([10], [40, 0])}, b"\0" * 40),
    "overlapping tensors": raw({KEY: entry([10], [0, 40]), "weight/b": entry([10], [0, 40])}, b"\0" * 40),
    "overlapping in part": raw({KEY: entry([10], [0, 40]), "weight/b": entry([10], [20, 60])}, b"\0" * 60),
    "a hole": raw({KEY: entry([1], [8, 12])}, b"\0" * 12),
    "bytes behind the last tensor": raw({KEY: entry([1], [0, 4])}, b"\0" * 12),
    "huge shape": raw({KEY: entry([1 << 60], [0, 40])}, b"\0" * 40),
    "shape that overflows": raw({KEY: entry([1 << 32, 1 << 32], [0, 0])}),
    "negative shape": raw({KEY: entry([-10], [0, 40])}, b"\0" * 40),
    "unknown type": raw({KEY: entry([10], [0, 40], "PICKLE")}, b"\0" * 40),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"a\.safetensors is no file of slices"):
        read_all([tmp_path / "a.safetensors"], 10)


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path: Path):
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("missing.safetensors", "folder.safetensors"):
        with pytest.raises(CheckpointError, match="is no file of slices"):
            read_all([tmp_path / name], 1)


class Bomb:
    """What runs as soon as it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("is_torch", [False, True])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_run(tmp_path: Path, is_torch: bool):
    trap = tmp_path / "it ran"
    staged = stage(tmp_path, 1)
    names = ["rank-00000-000.safetensors", "trainer.json"]
    for name in names:
        torch.save(Bomb(trap), staged / name) if is_torch else (staged / name).write_bytes(pickle.dumps(Bomb(trap)))
    path = commit_checkpoint(staged, step=1, files=describe_files(staged, names), facts={})

    assert find_damage(path) is None  # by its manifest it is whole
    with pytest.raises(CheckpointError):
        read_all([path / names[0]], 1)
    with pytest.raises(CheckpointError):
        read_json(path, names[1])

    assert not trap.exists()
    pickle.loads(pickle.dumps(Bomb(trap)))
    assert trap.exists()  # it is a trap
