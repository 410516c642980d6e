"""Compares post-training with its peers: python -m tests.benchmarks.post_training dpo|grpo [--quick]

Both sides train the same random model on the same tokens for as many steps, in fresh processes that take turns, and are
refused if their results differ; medians and their ratios are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tests.benchmarks.post_training import dpo, grpo

BENCHMARKS: dict[str, Callable[..., Table]] = {"dpo": dpo.compare, "grpo": grpo.compare}


def main() -> None:
    """Prints the table of one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each contender")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    repeats, steps = (1, 4) if options.quick else (options.repeats, options.steps)
    Console(width=120).print(BENCHMARKS[options.benchmark](num_steps=steps, repeats=repeats, is_quick=options.quick))


if __name__ == "__main__":
    main()
