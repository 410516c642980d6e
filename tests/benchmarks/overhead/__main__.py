"""Compares this trainer with a hand-written Accelerate loop: python -m tests.benchmarks.overhead --ranks 1 2

Same models, data and steps; fresh processes, the two interleaved; prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.overhead.parts import BATCH, LR, RESULT, START

PARTS = "tests.benchmarks.overhead.parts"
AIMS = {"step time (s)": 1.01, "peak memory (GB)": 1.01, "time to the first step (s)": 1.1}
Numbers = dict[str, float]


def by_hand(num_ranks: int, num_steps: int) -> list[str]:
    """Returns the command of the hand-written loop."""
    script = ["-m", "tests.benchmarks.overhead.by_hand", str(num_steps)]
    if num_ranks == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *script]


def ours(num_ranks: int, num_steps: int, folder: str) -> list[str]:
    """Returns the command of this trainer for the same work."""
    return [
        *(sys.executable, "-m", "trainer", "task=distill", "logger=[jsonl]", "~callbacks.samples"),
        f"callbacks.stopwatch._target_={PARTS}.Stopwatch",
        *("model@models.student.build=module", f"models.student.build._target_={PARTS}.student"),
        *("model@models.teacher.build=module", f"models.teacher.build._target_={PARTS}.teacher"),
        "models.student.dtype=float32",
        "models.teacher.dtype=float32",
        "plugin@models.teacher.plugin=zero3_inference",
        f"models.student.optimizer.lr={LR}",
        "scheduler@models.student.scheduler=null",
        f"data.train={{_target_: {PARTS}.Tokens, num_examples: {num_steps * BATCH * num_ranks}}}",
        f"data.batch_size={BATCH}",
        f"trainer.max_steps={num_steps}",
        "export.enabled=false",
        "checkpoint.enabled=false",  # which the loop by hand does not write either
        f"launch.num_processes={num_ranks}",
        f"hydra.run.dir={folder}/run",
    ]


def measure(command: list[str]) -> Numbers:
    """Runs one process to its end and returns what its stopwatch measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "numbers.json"
        environment = {**os.environ, RESULT: str(result), START: str(time.time()), "DS_ACCELERATOR": "cpu"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        total = time.perf_counter() - began
        numbers: Numbers = json.loads(result.read_text(encoding="utf-8"))
        return {**numbers, "total time (s)": total}


def compare(num_ranks: int, num_steps: int, repeats: int) -> Table:
    """Returns the medians of both loops and their ratios."""
    found: dict[str, list[Numbers]] = {"by hand": [], "ours": []}
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            pair = {"by hand": by_hand(num_ranks, num_steps), "ours": ours(num_ranks, num_steps, folder)}
            # Each goes first as often as the other.
            for name in sorted(pair, reverse=bool(repeat % 2)):
                found[name].append(measure(pair[name]))
    table = Table(title=f"{num_ranks} rank(s), median of {repeats} runs of {num_steps} steps")
    for column in ("", "by hand", "ours", "ratio", "aim"):
        table.add_column(column)
    for key, aim in AIMS.items():
        hand, own = (statistics.median(numbers[key] for numbers in found[name]) for name in ("by hand", "ours"))
        table.add_row(key, f"{hand:.4g}", f"{own:.4g}", f"{own / hand:.3f}", str(aim))
    return table


def main(compare: Callable[[int, int, int], Table], *, description: str | None) -> None:
    """Prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for num_ranks in args.ranks:
        Console().print(compare(num_ranks, args.steps, args.repeats))


if __name__ == "__main__":
    main(compare, description=__doc__)
