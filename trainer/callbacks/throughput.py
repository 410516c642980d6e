"""Measures how fast a run is and how much memory it takes."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer import distributed
from trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from trainer.task import Batch, TaskModule
    from trainer.trainer import MultiModelTrainer

KEPT_STEP_TIMES = 10_000


class Throughput(Callback):
    """Logs `perf/step_time`, `perf/tokens_per_s`, `perf/memory_gb` and, after a save, `perf/save_wait`.

    Step time is seconds per global step since the last log step, from the end of one step to the end of the next, so
    that waiting for data counts, without validations and saves; `perf/save_wait` is how many seconds training waited
    for checkpoints since then. Tokens are those of all ranks that the attention mask counts;
    batches without tokens give `perf/examples_per_s` instead. Memory is the largest of any rank since the start:
    peak GPU memory, or the process's peak resident memory on a CPU.
    """

    def __init__(self) -> None:
        self.step_times: deque[float] = deque(maxlen=KEPT_STEP_TIMES)
        self.rate: dict[str, float] = {}  # over the whole training, set when it ends: tokens_per_s or examples_per_s
        self.memory_gb: float | None = None
        self._last = 0.0
        self._seconds = self._total_seconds = 0.0
        self._items: Tensor | float = 0.0
        self._total_items: Tensor | float = 0.0
        self._unit = "tokens"
        self._steps = 0
        self._paused_at = self._save_began = 0.0
        self._save_wait = 0.0

    @property
    def median_step_time(self) -> float | None:
        """Seconds of a typical step, None before the first."""
        return statistics.median(self.step_times) if self.step_times else None

    def on_train_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_start(self, trainer: MultiModelTrainer, task: TaskModule, batch: Batch, batch_idx: int) -> None:
        for part in _parts(batch):
            count = count_tokens(part)
            if count is None:
                count = _num_examples(part)
                if not count:  # numbers that a task keeps beside its batch
                    continue
                self._unit = "examples"
            # A tensor stays on its device: reading it here would make the GPU wait in every micro-batch.
            self._items = self._items + count

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        now = time.perf_counter()
        self.step_times.append(now - self._last)
        self._seconds += now - self._last
        self._steps += 1
        self._last = now
        if not trainer.is_log_step:
            return
        items, memory_gb = _over_ranks(self._items, trainer)
        metrics["perf/step_time"] = self._seconds / self._steps
        metrics[f"perf/{self._unit}_per_s"] = items / self._seconds
        metrics["perf/memory_gb"] = memory_gb
        if self._save_wait:
            metrics["perf/save_wait"] = self._save_wait
        self._close_period()

    def on_save_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        self._save_began = time.perf_counter()

    def on_save_end(self, trainer: MultiModelTrainer, task: TaskModule, path: Path | None) -> None:
        waited = time.perf_counter() - self._save_began
        self._save_wait += waited
        self._last += waited

    def on_validation_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self._last += time.perf_counter() - self._paused_at

    def on_train_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._close_period()
        items, self.memory_gb = _over_ranks(self._total_items, trainer)
        if self._total_seconds > 0:
            self.rate = {f"{self._unit}_per_s": items / self._total_seconds}

    def _close_period(self) -> None:
        self._total_seconds += self._seconds
        self._total_items = self._total_items + self._items
        self._seconds, self._steps, self._items, self._save_wait = 0.0, 0, 0.0, 0.0


def _parts(batch: Batch) -> list[Batch]:
    """Returns the shared examples, where there are any, and each model's own."""
    own = [dict(value) for value in batch.values() if isinstance(value, Mapping)]
    shared = {key: value for key, value in batch.items() if not isinstance(value, Mapping)}
    return [shared, *own] if shared else own


def count_tokens(batch: Batch) -> Tensor | int | None:
    """Returns how many real tokens a micro-batch holds, None if it has neither a mask nor token ids.

    Several sequences, such as chosen_input_ids and rejected_input_ids, count together.
    """
    for suffix in ("attention_mask", "input_ids"):
        named = [batch[suffix]] if suffix in batch else [v for key, v in batch.items() if key.endswith(f"_{suffix}")]
        found: list[Tensor] = [value for value in named if isinstance(value, Tensor) and value.ndim == 2]
        if found and suffix == "attention_mask":
            return torch.stack([mask.sum() for mask in found]).sum()
        if found:
            return sum(ids.numel() for ids in found)
    return None


def _num_examples(batch: Batch) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim > 0), 0)


def _over_ranks(items: Tensor | float, trainer: MultiModelTrainer) -> tuple[float, float]:
    """Returns the sum of the items and the largest memory over all ranks, in one collective."""
    values = torch.zeros(1 + trainer.world_size, dtype=torch.float64, device=trainer.device)
    values[0] = float(items)
    values[1 + trainer.rank] = peak_memory_gb(trainer.device)
    values = distributed.sum_over_ranks(values)
    return values[0].item(), values[1:].max().item()


def peak_memory_gb(device: torch.device) -> float:
    """Returns the peak memory of this process: of its GPU, or its resident memory on a CPU; in 10^9 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
