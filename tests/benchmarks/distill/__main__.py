"""Compares distillation with its peers: python -m tests.benchmarks.distill kernels|trainers|cached|quality [--quick]

Kernels and trainers do the same work on the same numbers, in fresh processes that take turns, and are refused if their
results differ; medians and their ratios are printed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from tests.benchmarks.distill import cached, kernels, quality, trainers


def main() -> None:
    """Prints the tables of one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=["kernels", "trainers", "cached", "quality"])
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each contender")
    parser.add_argument("--tokens", type=int, default=2048, help="of kernels")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936], help="of kernels")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of trainers")
    parser.add_argument("--steps", type=int, default=8, help="of trainers and cached")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of quality")
    parser.add_argument("--student-steps", type=int, default=200, help="of quality")
    parser.add_argument("--teacher-steps", type=int, default=300, help="of quality")
    parser.add_argument("--folder", type=Path, help="of quality: where its runs go, and an earlier call left some")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    console = Console(width=120)
    if options.benchmark == "kernels":
        sizes = {"num_tokens": 64, "vocabularies": [4096]} if options.quick else {}
        wanted = {"num_tokens": options.tokens, "vocabularies": options.vocabularies, **sizes}
        for table in kernels.compare(**wanted, repeats=repeats):
            console.print(table)
    elif options.benchmark in ("trainers", "cached"):
        steps, batch_size, length = (3, 1, 16) if options.quick else (options.steps, 4, 257)
        sizes = {"num_steps": steps, "batch_size": batch_size, "length": length, "repeats": repeats}
        if options.benchmark == "cached":
            console.print(cached.compare(**sizes))
        else:
            for num_ranks in options.ranks:
                console.print(trainers.compare(num_ranks=num_ranks, **sizes))
    else:
        folder = options.folder or Path(tempfile.mkdtemp(prefix="quality-"))
        wanted = {"teacher_steps": options.teacher_steps, "student_steps": options.student_steps}
        if options.quick:
            wanted = {"teacher_steps": 2, "student_steps": 2}
        console.print(quality.compare(folder, seeds=options.seeds[: 1 if options.quick else None], **wanted))


if __name__ == "__main__":
    main()
