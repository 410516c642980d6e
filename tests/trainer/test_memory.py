"""What sharding saves is memory of the process, as the operating system counts it, not only numbers of elements."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.trainer.test_trainer import reset_accelerate
from trainer import ModelSpec, MultiModelTrainer, TaskModule, TrainingData

WIDTH, LAYERS = 2000, 16
WHOLE = 4 * LAYERS * WIDTH**2  # bytes in float32: 256 MB, far more than an allocator's slack
PLUGINS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "replicate": {"replicate": True},
}


def make_teacher(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def resident() -> int:
    """Returns this process's memory in bytes, once the allocator has given back what it can."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def teacher_under(plugin: str, width: int) -> MultiModelTrainer:
    reset_accelerate()
    trainer = MultiModelTrainer({"teacher": PLUGINS[plugin]}, max_steps=1)
    spec = ModelSpec(build=functools.partial(make_teacher, width), trainable=False, dtype=torch.float32)
    validation: Any = [{"x": torch.ones(width)} for _ in range(4)]
    trainer.prepare(TaskModule(), models={"teacher": spec}, data=TrainingData(validation=validation, batch_size=1))
    return trainer


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Returns what a teacher takes by the operating system and by its own account, as shares of the whole model."""
    found = {}
    kept = []  # nothing is freed in between, or the second teacher might fill the place of the first
    for plugin in PLUGINS:
        teacher_under(plugin, 8)  # what is imported and allocated once
        before = resident()
        trainer = teacher_under(plugin, WIDTH)
        assert trainer.models["teacher"].stage == (3 if plugin == "zero3" else None)
        built = resident() - before
        found[plugin] = {
            "built": built / WHOLE,
            "told": trainer.models["teacher"].local_bytes() / WHOLE,
        }
        kept.append(trainer)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("memory")
    return run_ranks(measure, folder, folder=folder, world_size=2)


def test_a_frozen_teacher_under_zero3_takes_half_of_its_weights_on_each_of_two_ranks(
    found: list[dict[str, dict[str, float]]],
) -> None:
    assert all(0.4 < rank["zero3"]["built"] < 0.65 for rank in found), found


def test_a_replicated_teacher_takes_all_of_them_on_each(found: list[dict[str, dict[str, float]]]) -> None:
    assert all(0.9 < rank["replicate"]["built"] < 1.15 for rank in found), found


def test_the_plan_tells_what_is_taken(found: list[dict[str, dict[str, float]]]) -> None:
    for rank in found:
        assert rank["zero3"]["told"] == pytest.approx(0.5, abs=0.01)
        assert rank["replicate"]["told"] == pytest.approx(1.0, abs=0.01)
