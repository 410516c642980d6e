"""Fresh processes in turn, the medians of what each measured, and the memory of the one that measures."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

Numbers = dict[str, float]
RESULT = "BENCHMARK_RESULT"  # the file that a measured process writes its numbers to


def run_fresh(arguments: Sequence[str], *, num_ranks: int = 1, num_threads: int = 1) -> Numbers:
    """Runs `python -m <arguments>` to its end, on several ranks under torchrun, and returns what rank 0 wrote."""
    launcher = ["torch.distributed.run", f"--nproc-per-node={num_ranks}", "-m"] if num_ranks > 1 else []
    command = [sys.executable, "-m", *launcher, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "numbers.json"
        environment = {
            **os.environ,
            RESULT: str(result),
            "OMP_NUM_THREADS": str(num_threads),
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        numbers: Numbers = json.loads(result.read_text(encoding="utf-8"))
        return numbers


def write_numbers(numbers: Numbers) -> None:
    """Leaves the numbers of this process where `run_fresh` looks for them."""
    if int(os.environ.get("RANK", 0)) == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(numbers), encoding="utf-8")


def interleave(
    contenders: Mapping[str, Sequence[str]], *, repeats: int, num_ranks: int = 1, num_threads: int = 1
) -> dict[str, Numbers]:
    """Returns the medians of each contender's numbers; the contenders take turns, and each goes first in turn."""
    found: dict[str, list[Numbers]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(run_fresh(contenders[name], num_ranks=num_ranks, num_threads=num_threads))
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def check_same_work(found: Mapping[str, Numbers], key: str, *, tolerance: float) -> None:
    """Raises if contenders computed different things: a comparison of their times would mean nothing."""
    values = {name: numbers[key] for name, numbers in found.items()}
    lowest, highest = min(values.values()), max(values.values())
    if not highest - lowest <= tolerance * abs(highest):
        raise SystemExit(f"the contenders did different work, {key}: {values}")


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


# Memory --------------------------------------------------------------------------------------------------------------


def settle_memory() -> int:
    """Gives free memory back, makes the kernel forget this process's peak, and returns its resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Returns the highest resident bytes of this process since `settle_memory`, or since its start."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
