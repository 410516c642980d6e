"""Whether examples are those that a run began with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.loader import data_key
from trainer.data.sources import TrainingData

LOOKED_AT = 16  # examples, evenly spread


def identify_sources(sources: Mapping[str, TrainingData]) -> dict[str, dict[str, Any]]:
    """Returns what tells each set of examples from another, by its key in the configuration."""
    return {
        data_key(name, part): identify(dataset)
        for name, source in sources.items()
        for part, dataset in source.parts.items()
    }


def identify(dataset: Dataset[Any]) -> dict[str, Any]:
    """Returns the number of examples, and a digest of some of them where reading one twice gives the same."""
    num_examples = len(dataset)  # type: ignore[arg-type]
    places = sorted({int(place) for place in np.linspace(0, num_examples - 1, min(LOOKED_AT, num_examples))})
    first, second = (_digest([dataset[place] for place in places]) for _ in range(2))
    return {"examples": num_examples, "digest": first if first == second else None}


def _digest(examples: Sequence[Any]) -> str | None:
    found = hashlib.sha256()
    try:
        _add(found, examples)
    except RecursionError:  # an object that holds itself
        return None
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    """Adds a value with its kind and its length, so that [1, 23] is not [12, 3]."""
    if isinstance(value, Mapping):
        found.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=str):
            _add(found, key)
            _add(found, value[key])
    elif isinstance(value, Tensor):
        _add(found, value.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        found.update(f"tensor {value.dtype}{tuple(value.shape)};".encode())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _add(found, value.tolist())
    elif isinstance(value, np.ndarray):
        found.update(f"array {value.dtype}{value.shape};".encode() + value.tobytes())
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)};".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, set | frozenset):
        _add(found, sorted(map(repr, value)))
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        found.update(f"{value!r};".encode())
    else:
        found.update(f"{type(value).__name__};".encode())
        _add(found, getattr(value, "__dict__", None))
