"""What a step with a loss or gradient that is not finite leaves behind: its losses and the examples they came from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import distributed
from trainer.data.loader import SHARED, data_key
from trainer.task import JOINT
from trainer.window import Window, owner

_SHOWN_EXAMPLES = 20


@dataclass(frozen=True, kw_only=True)
class MicroRecord:
    """One micro-batch of a window on one rank.

    Args:
        indices: Which examples it holds, by the set: data.train, models.<name>.data.train.
        losses: By the task's own keys, as it returned them; empty if the step ended before.
    """

    rank: int
    micro_batch: int
    is_filler: bool
    indices: dict[str, list[int]]
    losses: dict[str, float]

    @property
    def non_finite(self) -> list[str]:
        """The keys of its losses that are NaN or infinite."""
        return [key for key, value in self.losses.items() if not math.isfinite(value)]


class WindowRecord:
    """Every loss of a window on this rank, beside the examples that it came from."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._losses: list[dict[str, Tensor]] = [{} for _ in range(len(window))]

    def add(self, index: int, key: str, loss: Tensor) -> None:
        """Adds a loss of a micro-batch as the task returned it; waits for no device."""
        self._losses[index][key] = loss.detach()

    def gather(self) -> list[MicroRecord]:
        """Returns the micro-batches of all ranks; every rank must call it."""
        here = [
            MicroRecord(
                rank=distributed.rank(),
                micro_batch=index,
                is_filler=self.window.is_filler[index],
                indices={data_key(name, "train"): list(found) for name, found in self.window.indices[index].items()},
                losses={key: float(loss) for key, loss in losses.items()},
            )
            for index, losses in enumerate(self._losses)
        ]
        return [micro for of_rank in distributed.gather(here) for micro in of_rank]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What is known of a step with an update that is not finite.

    Args:
        problem: What is wrong, in a sentence.
        losses: By their owners, means over all ranks.
        grad_norms: Of the updates of this step, by model.
        skipped_in_a_row: By model.
    """

    step: int
    seed: int
    problem: str
    losses: dict[str, float]
    grad_norms: dict[str, float | None]
    skipped_in_a_row: dict[str, int]
    micro_batches: list[MicroRecord]

    def write(self, folder: Path | None) -> str:
        """Writes non_finite_step-<step>.json, on rank 0; returns a sentence on where it is, "" without a folder."""
        if folder is None:
            return ""
        path = folder / f"non_finite_step-{self.step}.json"
        try:
            if distributed.is_main():
                path.write_text(self._text(), encoding="utf-8")
        except OSError as error:  # must not take the place of the cause
            return f"What is known of it could not be written: {error}."
        return f"{path} holds every loss of the step and the examples that it came from."

    def _text(self) -> str:
        """Returns it as JSON, a line for each micro-batch."""
        content = _as_json(asdict(self))
        rows = ",\n  ".join(json.dumps(micro, allow_nan=False) for micro in content.pop("micro_batches"))
        head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{head},\n "micro_batches": [\n  {rows}\n ]\n}}\n'


def named_sources(micro_batches: Iterable[MicroRecord]) -> str:
    """Returns which losses are not finite on which ranks: "a, b/ce on rank 0; a on rank 3"."""
    by_rank: dict[int, dict[str, None]] = {}
    for micro in micro_batches:
        by_rank.setdefault(micro.rank, {}).update(dict.fromkeys(micro.non_finite))
    found = [f"{', '.join(keys)} on rank {rank}" for rank, keys in by_rank.items() if keys]
    return "; ".join(found) or "every loss that the task returned is finite, but their weighted sum is not"


def named_examples(micro_batches: Iterable[MicroRecord]) -> str:
    """Returns which examples the losses that are not finite came from: "3, 17 of data.train"."""
    by_set: dict[str, set[int]] = {}
    for micro in micro_batches:
        for name in dict.fromkeys(name for key in micro.non_finite for name in _sets_of(owner(key), micro)):
            by_set.setdefault(name, set()).update(micro.indices[name])
    return "; ".join(f"{_listed(sorted(found))} of {name}" for name, found in by_set.items())


def _sets_of(model: str, micro: MicroRecord) -> list[str]:
    """Returns the sets that a loss comes from: the model's own, else the shared one, else all."""
    nearest = (data_key(model, "train"), data_key(SHARED, "train"))
    return [name for name in nearest if name in micro.indices and model != JOINT][:1] or list(micro.indices)


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN_EXAMPLES]))
    return shown if len(indices) <= _SHOWN_EXAMPLES else f"{shown} and {len(indices) - _SHOWN_EXAMPLES} more"


def _as_json(value: Any) -> Any:
    """Returns the value with what JSON has no number for as "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list) else value
