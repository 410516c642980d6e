"""Slices of named tensors in safetensors files, one set per rank, read in any other cut."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.saving.checkpoints import CheckpointError

FILE_BYTES = 1 << 28  # of one file: what is copied at a time where the weights are on a GPU
_STARTS = "starts"


def write_slices(folder: Path, prefix: str, tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> list[str]:
    """Writes tensors to `<prefix>-<number>.safetensors` and returns the files' names."""
    names = []
    for number, part in enumerate(_parts(tensors)):
        own = {key: starts[key] for key in part if key in starts}
        names.append(f"{prefix}-{number:03d}.safetensors")
        save_file(part, folder / names[-1], metadata={_STARTS: json.dumps(own)})
    return names


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    num_bytes = 0
    for key, value in tensors.items():
        if part and num_bytes + value.nbytes > FILE_BYTES:
            yield _disjoint(part)
            part, num_bytes = {}, 0
        part[key] = value.contiguous()
        num_bytes += value.nbytes
    yield _disjoint(part)


def _disjoint(part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same with a copy of each tensor that shares memory with another: safetensors takes no such two."""
    end: dict[torch.device, int] = defaultdict(int)
    for key in sorted(part, key=lambda key: part[key].data_ptr()):
        value = part[key]
        if value.numel() and value.data_ptr() < end[value.device]:
            part[key] = value.clone()
        end[value.device] = max(end[value.device], value.data_ptr() + value.nbytes)
    return part


class SliceReader:
    """Reads what ranks wrote with `write_slices`; only the bytes that are asked for.

    Args:
        files: All files of one model.
    """

    def __init__(self, files: list[Path]) -> None:
        self._opened = ExitStack()
        self._slices: dict[str, list[tuple[Any, int, int]]] = defaultdict(list)  # (file, first element, elements)
        self._keys: dict[tuple[str, str], list[str]] = defaultdict(list)
        for file in files:
            self._index(file)

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def _index(self, file: Path) -> None:
        try:
            opened = self._opened.enter_context(safe_open(file, framework="pt"))
            starts = json.loads((opened.metadata() or {}).get(_STARTS, "{}"))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is no file of slices ({error})") from error
        if not isinstance(starts, dict) or not all(type(start) is int and start >= 0 for start in starts.values()):
            raise CheckpointError(f"{file} does not say where its slices start")
        for key in opened.keys():  # noqa: SIM118 - no mapping
            kind, _, name = key.partition("/")
            if "/" in name and key not in self._slices:
                state, _, weight = name.partition("/")
                self._keys[kind, weight].append(state)
            numel = math.prod(opened.get_slice(key).get_shape())
            self._slices[key].append((opened, starts.get(key, 0), numel))

    def keys_of(self, kind: str, name: str) -> list[str]:
        """Returns the <key>s of which there is a "<kind>/<key>/<name>"."""
        return self._keys.get((kind, name), [])

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the data type of a tensor that was saved."""
        return self._first(key, slice(0)).dtype

    def read(self, key: str) -> Tensor:
        """Returns a tensor that one rank wrote whole."""
        return self._first(key, slice(None))

    def _first(self, key: str, cut: slice) -> Tensor:
        if key not in self._slices:
            raise CheckpointError(f"the checkpoint does not hold {key}")
        opened, *_ = self._slices[key][0]
        shape = opened.get_slice(key).get_shape()
        value: Tensor = opened.get_slice(key)[cut] if shape else opened.get_tensor(key)
        return value

    def fill(self, target: Tensor, key: str, *, start: int) -> None:
        """Copies elements of a flattened tensor, from `start` on, into a view, (N,)."""
        end, done = start + target.numel(), start
        for opened, first, numel in sorted(self._slices.get(key, ()), key=lambda entry: entry[1]):
            low, high = max(start, first), min(end, first + numel)
            if low >= high:
                continue
            stretch = opened.get_slice(key)
            if low != done or len(stretch.get_shape()) != 1:
                raise CheckpointError(f"the checkpoint's slices of {key} do not follow one another at element {done}")
            target[low - start : high - start].copy_(stretch[low - first : high - first])
            done = high
        if done != end:
            held = done - start
            raise CheckpointError(f"the checkpoint holds {held} of the {end - start} elements that are needed of {key}")
