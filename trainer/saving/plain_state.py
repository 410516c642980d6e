"""State of callbacks, tasks, schedules and optimizers as JSON and tensors: nothing that could run when it is read."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KIND = "__kind__"
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
_NUMBERS = "biuf"  # NumPy's kinds of numbers: truth values, integers with and without a sign, real numbers
_UNSAVED = (torch.complex32, torch.complex128)  # safetensors lacks them


def pack(state: Any, tensors: dict[str, Tensor], *, name: str) -> Any:
    """Returns state as what JSON holds exactly; tensors go into `tensors`, under names that start with `name`.

    Numbers, text, None, lists, tuples, sets, deques, counters, mappings with any such keys, tensors, and NumPy's
    numbers and arrays; TypeError for the rest.
    """
    if isinstance(state, np.generic) and not isinstance(state, str):
        return _packed_number(state, name)
    if state is None or isinstance(state, bool | int | str):
        return state
    if isinstance(state, float):
        return state if math.isfinite(state) else {_KIND: "float", "value": repr(state)}
    if isinstance(state, Tensor | np.ndarray):
        key = _free_name(name, tensors)
        tensors[key] = _plain_tensor(state, name)
        return {_KIND: "tensor" if isinstance(state, Tensor) else "array", "name": key}
    if isinstance(state, list | tuple | set | frozenset | deque):
        items = [pack(item, tensors, name=f"{name}.{index}") for index, item in enumerate(state)]
        if isinstance(state, deque):
            return {_KIND: "deque", "items": items, "maxlen": state.maxlen}
        kind = next((word for word, cls in _SEQUENCES.items() if isinstance(state, cls)), None)
        return items if kind is None else {_KIND: kind, "items": items}
    if isinstance(state, Mapping):
        is_counter = isinstance(state, Counter)
        if all(type(key) is str for key in state) and _KIND not in state and not is_counter:
            return {key: pack(value, tensors, name=f"{name}.{key}") for key, value in state.items()}
        pairs = [[key, value] for key, value in state.items()]
        return {_KIND: "counter" if is_counter else "mapping", "pairs": pack(pairs, tensors, name=name)}
    raise _refusal(state, name)


def _refusal(state: Any, name: str, why: str = "") -> TypeError:
    return TypeError(
        f"{name} is of type {type(state).__name__}{why}; a checkpoint holds numbers, text, lists, tuples, sets, "
        "mappings and tensors"
    )


def _packed_number(state: np.generic, name: str) -> dict[str, Any]:
    value = state.item()
    if state.dtype.kind not in _NUMBERS or not isinstance(value, bool | int | float):
        raise _refusal(state, name)
    return {_KIND: "number", "dtype": state.dtype.name, "value": pack(value, {}, name=name)}


def _free_name(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the name, or one like it: {"a.b": x, "a": {"b": y}} asks for one name twice."""
    names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(1)))
    return next(name for name in names if name not in tensors)


def _plain_tensor(state: Tensor | np.ndarray[Any, Any], name: str) -> Tensor:
    if isinstance(state, np.ndarray):
        if state.dtype.kind not in _NUMBERS or state.dtype.itemsize > 8:
            raise _refusal(state, name, f" and holds {state.dtype}")
        # A copy: torch takes no negative strides and no foreign byte order.
        return torch.from_numpy(np.array(state, dtype=state.dtype.newbyteorder("="), order="C"))
    if state.layout != torch.strided or state.is_meta or state.dtype in _UNSAVED:
        raise _refusal(state, name, f" and {state.layout}, {state.dtype} on {state.device}")
    return state.detach().cpu().resolve_conj().resolve_neg().contiguous()


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `pack` was given; mappings come back as dicts, named tuples as tuples, tensors on the CPU."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed.get(_KIND)
    if kind is None:
        return {key: unpack(value, tensors) for key, value in packed.items()}
    if kind == "float":
        return float(packed["value"])
    if kind == "number":
        return np.dtype(packed["dtype"]).type(unpack(packed["value"], {}))
    if kind in ("tensor", "array"):
        tensor = tensors[packed["name"]]
        return tensor if kind == "tensor" else tensor.numpy()
    if kind in ("mapping", "counter"):
        pairs = dict(unpack(packed["pairs"], tensors))
        return pairs if kind == "mapping" else Counter(pairs)
    items = unpack(packed["items"], tensors)
    return deque(items, packed["maxlen"]) if kind == "deque" else _SEQUENCES[kind](items)
