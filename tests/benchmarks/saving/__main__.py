"""Compares saving and resuming with torch.save, torch.load and checksums: python -m tests.benchmarks.saving

The same tensors of the same models, in one run, the two interleaved; prints medians and their ratios. Both write to the
disk (fsync) and both read what was just written, from the system's cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.saving.measure import Numbers, measure
from tests.ranks import run_ranks

AIMS = {"save": 1.3, "resume": 1.2, "peak memory while saving": 1.1}


def main() -> None:
    """Prints one table per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--millions", type=int, default=100, help="weights of all models together")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], help="ZeRO stage of each model")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for ranks in options.ranks:
        folder = Path(tempfile.mkdtemp(prefix="saving-"))
        arguments = (options.millions, tuple(options.stages), options.repeats, folder)
        found = run_ranks(measure, *arguments, folder=folder, world_size=ranks, timeout=1200)[0]
        Console().print(table_of(found, ranks))
        shutil.rmtree(folder)


def table_of(found: Numbers, ranks: int) -> Table:
    """Returns the medians and their ratios."""
    median = {name: statistics.median(values) for name, values in found.items()}
    table = Table("", "this trainer", "torch", "ratio", "aim", title=f"{ranks} ranks" if ranks > 1 else "1 rank")
    for ours, theirs in (("save", "torch.save"), ("resume", "torch.load")):
        ratio = median[ours] / median[theirs]
        table.add_row(f"{ours} (s)", f"{median[ours]:.3f}", f"{median[theirs]:.3f}", f"{ratio:.2f}", f"{AIMS[ours]}")
    name = "peak memory while saving"
    table.add_row(f"{name}, of training's", "", "", f"{median['memory']:.2f}", f"{AIMS[name]}")
    return table


if __name__ == "__main__":
    main()
