import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer.callbacks import Throughput
from trainer.callbacks.throughput import count_tokens


def stand_in(**changes: Any) -> Any:
    values = {"is_log_step": True, "rank": 0, "world_size": 1, "device": torch.device("cpu"), "global_step": 1}
    return SimpleNamespace(**values | changes)


def step(callback: Throughput, trainer: Any, batches: list[dict[str, Any]], seconds: float = 0.05) -> dict[str, float]:
    for index, batch in enumerate(batches):
        callback.on_train_batch_start(trainer, None, batch, index)
    time.sleep(seconds)
    metrics: dict[str, float] = {}
    callback.on_train_step_end(trainer, None, metrics)
    return metrics


def test_tokens_per_second_counts_the_mask_of_all_micro_batches() -> None:
    callback, trainer = Throughput(), stand_in()
    batch = {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}

    callback.on_train_start(trainer, None)
    metrics = step(callback, trainer, [batch, batch])

    assert metrics["perf/tokens_per_s"] * metrics["perf/step_time"] == pytest.approx(10)
    assert metrics["perf/step_time"] >= 0.05
    assert metrics["perf/memory_gb"] > 0.05  # this process, with torch in it


def test_numbers_beside_the_tokens_of_a_batch_are_no_examples() -> None:
    callback, trainer = Throughput(), stand_in()
    batch = {"input_ids": torch.zeros(2, 4), "shown": {"reward": [torch.tensor(1.0), torch.tensor(2)]}}

    callback.on_train_start(trainer, None)
    metrics = step(callback, trainer, [batch])

    assert metrics["perf/tokens_per_s"] * metrics["perf/step_time"] == pytest.approx(8)
    assert "perf/examples_per_s" not in metrics


def test_step_time_is_the_mean_since_the_last_log_step_without_validation() -> None:
    callback, trainer = Throughput(), stand_in(is_log_step=False)
    callback.on_train_start(trainer, None)

    assert step(callback, trainer, [], seconds=0.02) == {}
    callback.on_validation_start(trainer, None)
    time.sleep(1.0)
    callback.on_validation_end(trainer, None, {})
    trainer.is_log_step = True
    metrics = step(callback, trainer, [{"x": torch.zeros(3, 2)}], seconds=0.04)

    assert 0.03 <= metrics["perf/step_time"] < 0.4
    assert metrics["perf/examples_per_s"] * 2 * metrics["perf/step_time"] == pytest.approx(3)


def test_totals_of_the_training_are_there_when_it_ends() -> None:
    callback, trainer = Throughput(), stand_in(is_log_step=False)

    callback.on_train_start(trainer, None)
    for _ in range(3):
        step(callback, trainer, [{"input_ids": torch.zeros(2, 5)}], seconds=0.02)
    callback.on_train_end(trainer, None)

    assert callback.median_step_time == sorted(callback.step_times)[1]
    assert callback.rate["tokens_per_s"] == pytest.approx(30 / sum(callback.step_times))
    assert callback.memory_gb is not None


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"attention_mask": torch.ones(2, 1, 4, 4), "input_ids": torch.zeros(2, 4)}, 8),  # a block mask counts nothing
        ({"chosen_input_ids": torch.zeros(1, 4), "rejected_input_ids": torch.zeros(1, 3)}, 7),
        ({"image": torch.zeros(2, 3)}, None),
    ],
)
def test_tokens_are_found_in_any_batch(batch: dict[str, Any], count: int | None) -> None:
    assert count_tokens(batch) == count


def measure_one_step() -> dict[str, float]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    callback, trainer = Throughput(), stand_in(rank=rank, world_size=2)
    callback.on_train_start(trainer, None)
    metrics = step(callback, trainer, [{"input_ids": torch.zeros(1, 10 * (rank + 1))}])
    dist.destroy_process_group()
    return metrics


def test_all_ranks_report_the_tokens_of_all_and_the_largest_memory(tmp_path: Path) -> None:
    first, second = run_ranks(measure_one_step, folder=tmp_path, world_size=2)

    for metrics in (first, second):
        assert metrics["perf/tokens_per_s"] * metrics["perf/step_time"] == pytest.approx(30)
    assert first["perf/memory_gb"] == second["perf/memory_gb"]
