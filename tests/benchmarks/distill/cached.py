"""Training from a cache of the teacher, against training the same student on the text alone.

As a module it is the process that measures one: python -m tests.benchmarks.distill.cached "from the cache" 8 4 257
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from tests.benchmarks.distill.contenders import LR, Rows, divergence, student, teacher
from tests.benchmarks.distill.measure import interleave, num_cores
from tests.benchmarks.stopwatch import MAX_NORM, MEMORY, STEP_TIME, Stopwatch, StopwatchCallback
from trainer import ModelSpec, MultiModelTrainer, TaskModule, TrainingData

MODULE = "tests.benchmarks.distill.cached"
CACHE = "BENCHMARK_CACHE"  # the folder of the cache
AIM = 1.05
TOP_K = 64


def from_the_cache(num_steps: int, batch_size: int, length: int) -> None:
    """The teacher is recorded by another process; none is in this one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        sizes = [str(size) for size in (num_steps, batch_size, length)]
        subprocess.run([sys.executable, "-m", MODULE, "record", *sizes], check=True)
        _train(_task(), num_steps, batch_size, length)


def student_alone(num_steps: int, batch_size: int, length: int) -> None:
    """Cross-entropy on the text."""
    from tasks.disjoint import DisjointTask

    _train(DisjointTask(), num_steps, batch_size, length)


def record(num_steps: int, batch_size: int, length: int) -> None:
    """Writes the cache."""
    from trainer.recording import cache_teacher

    spec = ModelSpec(build=teacher, dtype=torch.float32, trainable=False)
    trainer = MultiModelTrainer({"teacher": {"replicate": True}}, max_steps=1)
    data = TrainingData(train=Rows(num_steps * batch_size, length), batch_size=batch_size)
    cache_teacher(trainer, _task(), models={"teacher": spec}, data=data)


def _task() -> Any:
    from tasks.distill import DistillTask

    options = {"path": os.environ[CACHE], "top_k": TOP_K, "temperatures": [1.0], "mask": "completion"}
    return DistillTask(terms={"forward_kl": {}}, cache=options)


def _train(task: TaskModule, num_steps: int, batch_size: int, length: int) -> None:
    stopwatch = Stopwatch()
    trainer = MultiModelTrainer(
        {"student": {"zero_optimization": {"stage": 2}}},
        max_steps=num_steps,
        callbacks={"stopwatch": StopwatchCallback(stopwatch)},
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.0)
    spec = ModelSpec(build=student, dtype=torch.float32, optimizer=optimizer, max_grad_norm=MAX_NORM)
    data = TrainingData(train=Rows(num_steps * batch_size, length), batch_size=batch_size)
    trainer.fit(task, models={"student": spec}, data=data)
    stopwatch.finish(divergence=divergence(trainer.models["student"].module, length))


CONTENDERS: dict[str, Callable[[int, int, int], None]] = {
    "from the cache": from_the_cache,
    "student alone": student_alone,
    "record": record,
}


def compare(*, num_steps: int, batch_size: int, length: int, repeats: int) -> Table:
    """Returns the medians of both, and what the cache costs."""
    sizes = [str(size) for size in (num_steps, batch_size, length)]
    names = ("from the cache", "student alone")
    found = interleave({name: [MODULE, name, *sizes] for name in names}, repeats=repeats, num_threads=num_cores())
    table = Table(
        "", *names, "ratio", "aim", title=f"1 rank, {batch_size} x {length} tokens, top {TOP_K} of the teacher"
    )
    for key, aim in ((STEP_TIME, f"{AIM}"), (MEMORY, "")):
        cached, alone = (found[name][key] for name in names)
        table.add_row(key, f"{cached:.4g}", f"{alone:.4g}", f"{cached / alone:.2f}", aim)
    return table


if __name__ == "__main__":
    contender, *numbers = sys.argv[1:]
    num_steps, batch_size, length = map(int, numbers)
    CONTENDERS[contender](num_steps, batch_size, length)
