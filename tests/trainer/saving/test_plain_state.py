"""State comes back exactly, or is refused by name; nothing runs when it is read."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.saving.plain_state import pack, unpack
from trainer.saving.slices import write_slices


def through_files(state: Any, folder: Path) -> Any:
    """Returns state after its way through JSON text and a safetensors file."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(state, tensors, name="state"), allow_nan=False)
    (name,) = write_slices(folder, "rank-00000", tensors, {})
    return unpack(json.loads(text), load_file(folder / name))


def is_same(left: Any, right: Any) -> bool:
    """Returns whether two values are the same in type and to the last bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return is_same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(repr(left) == repr(right))


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "state",
    [
        None, True, False, 0, -1, 2**64, -(10**1000), "", "text", "snow \u2603, \ud800, \0", 0.1, -0.0, 1e-320, 1.0,
        1e22,
        math.inf, -math.inf, math.nan, [], {}, (), [[], [{}]], [1, (2, [3, (4,)])], (1,), {"a": {"b": [1.5, None]}},
        {1: "one", "1": "text", 2.5: 3, None: 4, False: 5, (1, (2, "x")): 6, math.inf: 7, -1: {3: 4}},
        {"__kind__": "tuple", "items": [1]}, {"a": {"__kind__": None}}, {"__kind__": {"__kind__": "float"}},
        set(), {1, 2}, frozenset({3}), {frozenset({1}): {2}}, deque([1, (2,)]), deque([1, 2], maxlen=2),
        Counter({"a": 2, 3: 1}), [Counter()],
        np.float32(0.1), np.float64(-0.0), np.float16(math.nan), np.int64(-3), np.uint64(2**64 - 1), np.bool_(True),
        {np.int64(3): np.float32(1)}, np.random.default_rng(0).bit_generator.state, random.Random(0).getstate(),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_tensor_comes_back_exactly(state: Any, tmp_path: Path):
    assert is_same(through_files(state, tmp_path), state)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_types_and_shapes_come_back_exactly(dtype: torch.dtype, tmp_path: Path):
    filled = torch.arange(24).reshape(2, 3, 4).to(dtype)
    state = [filled, filled[0, 0, 1], filled[:, :0], torch.empty(0, dtype=dtype), filled.mT, filled[:, ::2], filled[1]]

    found = through_files(state, tmp_path)

    assert is_same(found, state)
    assert all(tensor.is_contiguous() for tensor in found)


def test_special_numbers_in_tensors_and_arrays_keep_their_bits(tmp_path: Path):
    numbers = [math.nan, -math.nan, math.inf, -0.0, 1e-45]

    state = {"tensor": torch.tensor(numbers), "array": np.array(numbers), "half": torch.tensor(numbers).bfloat16()}

    assert is_same(through_files(state, tmp_path), state)


def test_arrays_come_back_as_arrays_that_can_be_written_to(tmp_path: Path):
    state = {
        "c": np.arange(6.0).reshape(2, 3),
        "scalar": np.array(3),
        "empty": np.empty((0, 2), dtype=np.int16),
        "bool": np.array([True, False]),
        "unsigned": np.array([2**64 - 1], dtype=np.uint64),
        "half": np.array([0.1], dtype=np.float16),
    }

    found = through_files(state, tmp_path)

    assert is_same(found, state)
    found["c"] += 1


def test_arrays_of_unusual_layout_keep_their_values(tmp_path: Path):
    frozen = np.arange(3)
    frozen.flags.writeable = False
    state = [np.arange(3)[::-1], np.asfortranarray(np.arange(6).reshape(2, 3)), np.array([1, 2], dtype=">i4"), frozen]

    found = through_files(state, tmp_path)

    assert all(np.array_equal(one, other) for one, other in zip(found, state, strict=True))


def test_mappings_and_tuples_of_other_classes_come_back_plain(tmp_path: Path):
    point = namedtuple("point", "x y")
    counts: defaultdict[str, int] = defaultdict(int, a=1)

    found = through_files([point(1, 2), counts, OrderedDict(b=1, a=2), torch.Size([3])], tmp_path)

    assert is_same(found, [(1, 2), {"a": 1}, {"b": 1, "a": 2}, (3,)])


def test_names_that_coincide_keep_their_tensors_apart(tmp_path: Path):
    one, two, three, four = (torch.tensor([float(number)]) for number in range(4))
    state = {"a.b": one, "a": {"b": two}, "l": [three], "l.0": four, "a.b~1": one, 1: {"x": two}, "0": [[three, four]]}

    assert is_same(through_files(state, tmp_path), state)


def test_two_parts_that_share_the_tensors_stay_apart():
    tensors: dict[str, Tensor] = {}

    packed = [pack({"x": torch.tensor(float(number))}, tensors, name="callbacks.a") for number in range(2)]

    assert [float(unpack(part, tensors)["x"]) for part in packed] == [0.0, 1.0]


def test_one_tensor_under_two_names_and_views_of_it_come_back_exactly(tmp_path: Path):
    weight = torch.arange(6.0)
    state = {"one": weight, "same": weight, "view": weight[1:4], "turned": weight.reshape(2, 3).T, "rest": weight[4:]}

    assert is_same(through_files(state, tmp_path), state)


def test_a_tensor_comes_back_without_its_graph(tmp_path: Path):
    weight = torch.nn.Parameter(torch.ones(2))

    found = through_files([weight, weight * 2], tmp_path)

    assert [tensor.requires_grad for tensor in found] == [False, False]
    assert torch.equal(found[1], torch.full((2,), 2.0))


class Thing:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Thing(), Thing, len, functools.partial(len), lambda: 0, b"bytes", bytearray(b"x"), 1j, range(3), iter([1]),
        Path("x"), torch.float32, torch.device("cpu"), torch.Generator(), np.datetime64("2026-01-01", "ns"),
        np.timedelta64(3, "ns"), np.longdouble(1), np.complex64(1), np.dtype("int8"), np.array(["a"]),
        np.array([Thing()]), np.array([1j]), np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("x", "i4")]), torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_refused_where_it_stands(value: Any):
    kind = type(value).__name__

    with pytest.raises(TypeError, match=rf"^callbacks\.mine\.list\.1\.x is of type {kind}\b"):
        pack({"list": [0, {"x": value}]}, {}, name="callbacks.mine")


@pytest.mark.parametrize("key", [Thing(), b"x", 1j, torch.float32])
def test_a_key_that_cannot_be_saved_is_refused(key: Any):
    with pytest.raises(TypeError, match="is of type"):
        pack({key: 1}, {}, name="task")


@pytest.mark.parametrize(
    "packed",
    [
        {"__kind__": "object", "items": []}, {"__kind__": "tuple"}, {"__kind__": [], "items": []},
        {"__kind__": "float"},
        {"__kind__": "float", "value": "one"}, {"__kind__": "tensor", "name": "missing"}, {"__kind__": "tensor"},
        {"__kind__": "mapping", "pairs": [[1]]}, {"__kind__": "mapping", "pairs": [[[1], 2]]},
        {"__kind__": "number", "dtype": "object_", "value": {"__kind__": "object"}},
        {"__kind__": "number", "dtype": "no"},
        {"__kind__": "set", "items": [[1]]}, {"__kind__": "deque", "items": [], "maxlen": "x"},
    ],
    ids=repr,
)  # fmt: skip
def test_what_pack_never_wrote_ends_in_an_error(packed: Any):
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpack(packed, {})
