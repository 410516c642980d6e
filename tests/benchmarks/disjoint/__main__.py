"""Compares two models in one run with two runs of a hand-written loop: python -m tests.benchmarks.disjoint --ranks 1 2

Same models, data and steps; fresh processes, the two interleaved; prints medians and their ratios.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from rich.table import Table

from tests.benchmarks.disjoint.by_hand import MODELS
from tests.benchmarks.overhead.__main__ import PARTS, Numbers, main, measure
from tests.benchmarks.overhead.parts import BATCH, LR

AIMS = {"step time (s)": 1.02, "total time (s)": 1.02}


def by_hand(num_ranks: int, num_steps: int, name: str) -> list[str]:
    """Returns the command of the hand-written loop for one model."""
    script = ["-m", "tests.benchmarks.disjoint.by_hand", str(num_steps), name]
    if num_ranks == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *script]


def ours(num_ranks: int, num_steps: int, folder: str) -> list[str]:
    """Returns the command of this trainer for both models at once."""
    models = [
        override
        for name, (build, _) in MODELS.items()
        for override in (
            f"model@models.{name}.build=module",
            f"models.{name}.build._target_={PARTS}.{build.__name__}",
            f"models.{name}.dtype=float32",
            f"models.{name}.optimizer.lr={LR}",
            f"scheduler@models.{name}.scheduler=null",
        )
    ]
    return [
        *(sys.executable, "-m", "trainer", "task=disjoint", "logger=[jsonl]", *models),
        f"callbacks.stopwatch._target_={PARTS}.Stopwatch",
        f"data.train={{_target_: {PARTS}.Tokens, num_examples: {num_steps * BATCH * num_ranks}}}",
        "data.tokenizer=null",
        f"data.batch_size={BATCH}",
        f"trainer.max_steps={num_steps}",
        "export.enabled=false",
        "checkpoint.enabled=false",  # which the loop by hand does not write either
        f"launch.num_processes={num_ranks}",
        f"hydra.run.dir={folder}/run",
    ]


def compare(num_ranks: int, num_steps: int, repeats: int) -> Table:
    """Returns the medians of one run with both models and of the sum of two runs, and their ratios."""
    apart: list[Numbers] = []
    together: list[Numbers] = []
    for repeat in range(repeats):
        for is_ours in (bool(repeat % 2), not repeat % 2):  # each goes first as often as the other
            with tempfile.TemporaryDirectory() as folder:
                if is_ours:
                    together.append(measure(ours(num_ranks, num_steps, folder)))
                else:
                    runs = [measure(by_hand(num_ranks, num_steps, name)) for name in MODELS]
                    apart.append({key: sum(run[key] for run in runs) for key in AIMS})
    table = Table(title=f"two models on {num_ranks} rank(s), median of {repeats} runs of {num_steps} steps")
    for column in ("", "two runs by hand", "one run", "ratio", "aim"):
        table.add_column(column)
    for key, aim in AIMS.items():
        hand, own = (statistics.median(numbers[key] for numbers in found) for found in (apart, together))
        table.add_row(key, f"{hand:.4g}", f"{own:.4g}", f"{own / hand:.3f}", str(aim))
    return table


if __name__ == "__main__":
    main(compare, description=__doc__)
