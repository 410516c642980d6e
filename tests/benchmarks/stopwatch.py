"""The stopwatch that every contender runs under, and the settings by which TRL's trainers do what this one does."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

from tests.benchmarks.distill.measure import Numbers, peak_bytes, write_numbers
from trainer import Callback

STEP_TIME, CPU_TIME, MEMORY = "step time (s)", "CPU seconds a step", "peak memory (MB)"
MAX_NORM = 1.0
WARM_UP = 2  # steps; the second is the first with the optimizer's state


class Stopwatch:
    """Measures from the end of a step to the end of the next: all that a step costs, its batch and logging too."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.memory = 0

    def end_step(self) -> None:
        """A step ended."""
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())
        self.memory = peak_bytes()  # before the closing check, which builds logits

    def finish(self, **results: float) -> None:
        """Leaves the numbers, and what the contender came to, by which it is known that it did the same work."""
        times = {STEP_TIME: self.ends, CPU_TIME: self.cpu_ends}
        numbers: Numbers = {
            name: statistics.median(after - before for before, after in pairwise(ends[WARM_UP - 1 :]))
            for name, ends in times.items()
        }
        write_numbers({**numbers, MEMORY: self.memory / 1e6, **results})


class StopwatchCallback(Callback):
    """The stopwatch as this trainer runs it."""

    order = 1000

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_step_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.stopwatch.end_step()


def watch_trl(stopwatch: Stopwatch) -> Any:
    """Returns the stopwatch as a callback of transformers' Trainer."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stopwatch.end_step()

    return Watch()


def trl_settings(num_steps: int, batch_size: int, *, lr: float) -> dict[str, Any]:
    """Returns the settings of TRL's trainers that make them do what ours does by default."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": lr,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_epsilon": 1e-8,
        "bf16": False,
        "gradient_checkpointing": False,  # or it would compute the trained model's layers twice
        "use_cpu": True,
        "ddp_backend": "gloo" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
