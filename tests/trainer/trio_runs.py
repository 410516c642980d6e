"""Runs of the trio through the command line: started, killed, and compared with one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from trainer.saving.checkpoints import find_all, find_damage

ROOT = Path(__file__).parents[2]


def command(folder: Path, *overrides: str, ranks: int = 2) -> list[str]:
    """Returns the command of a run into a folder, of the trio where no task is given."""
    task = [] if any(override.startswith("task=") for override in overrides) else ["task=trio"]
    return [
        *(sys.executable, "-m", "trainer", f"--config-dir={ROOT}/tests/trainer/soak_conf", *task),
        *(f"hydra.run.dir={folder}", f"launch.num_processes={ranks}", "logger=[jsonl]", *overrides),
    ]


def environment(**extra: str) -> dict[str, str]:
    """Returns the variables of a run."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", **extra}


def start(folder: Path, *overrides: str, ranks: int = 2, **options: Any) -> subprocess.Popen[str]:
    """Starts a run, whose output goes to a file: a pipe that nobody reads would fill up and stop it."""
    with output_file(folder).open("w", encoding="utf-8") as output:
        return subprocess.Popen(
            command(folder, *overrides, ranks=ranks),
            cwd=folder.parent,
            env=environment(**options),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def output_file(folder: Path) -> Path:
    """Returns where what a run prints goes."""
    return folder.with_name(f"{folder.name}.out")


def end_of(process: subprocess.Popen[str], folder: Path, *, timeout: float = 300) -> tuple[int, str]:
    """Returns the exit status and the output of a run, once it has ended."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"over {timeout} s: {output_file(folder).read_text()[-3000:]}") from None
    return process.returncode, output_file(folder).read_text(encoding="utf-8")


def run(folder: Path, *overrides: str, ranks: int = 2, timeout: float = 300, **options: Any) -> tuple[int, str]:
    """Returns the exit status and the output of a run."""
    return end_of(start(folder, *overrides, ranks=ranks, **options), folder, timeout=timeout)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Returns the ranks of a run that have begun to train, so that a kill hits a run and not a start."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if "RANK" in child.environ()]
    except psutil.Error:
        return []


def num_lines(folder: Path) -> int:
    """Returns how many numbers a run has written."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for(condition: Any, *, seconds: float = 120) -> None:
    """Returns when a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Returns the content of metrics.jsonl, perf/ aside."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


def newest(folder: Path) -> Path:
    """Returns the newest checkpoint of a run."""
    return find_all(folder / "checkpoints")[0]


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a run's newest checkpoint."""
    path = newest(folder)
    assert find_damage(path) is None
    files = sorted(path.glob("models/*/*.safetensors"))
    return {f"{file.relative_to(path)}:{key}": value for file in files for key, value in load_file(file).items()}


def assert_same_run(folder: Path, expected: Path) -> None:
    """Asserts that a run came to the same end as another, to the last bit, by the same numbers."""
    assert newest(folder).name == newest(expected).name
    state, other = saved_state(folder), saved_state(expected)
    assert state.keys() == other.keys()
    assert [key for key in state if not torch.equal(state[key], other[key])] == []
    assert numbers(folder) == numbers(expected)
    assert read_summary(folder)["status"] == "completed"


def read_summary(folder: Path) -> Mapping[str, Any]:
    """Returns how a run ended."""
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return content


def shared_memory() -> set[str]:
    """Returns what lies in the system's shared memory, without what processes that live have made: torch_<pid>_..."""
    found = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    return {name for name, owner in found.items() if owner is None or not psutil.pid_exists(int(owner[1]))}


def kill_at_random(
    process: subprocess.Popen[str], folder: Path, *, kills: int, longest: float, draw: random.Random
) -> list[str]:
    """Kills a random rank so many times, a random time after the ranks' first step, or sometimes before it.

    Returns:
        How many numbers each was when it was killed, and whether it was saving.
    """
    moments: list[str] = []
    file, staged = folder / "metrics.jsonl", folder / "checkpoints"
    while len(moments) < kills and process.poll() is None:
        since = time.time_ns()
        _wait(process, lambda since=since: file.exists() and file.stat().st_mtime_ns > since)  # the log is open
        if draw.random() < 0.8:
            size = file.stat().st_size
            _wait(process, lambda size=size: file.stat().st_size > size)
        time.sleep(draw.uniform(0, longest))
        ranks = ranks_of(process)
        if process.poll() is not None or not ranks:
            break
        draw.choice(ranks).kill()
        is_saving = staged.is_dir() and any(staged.glob(".*.part"))
        moments.append(f"line {num_lines(folder)}{', saving' if is_saving else ''}")
        wait_for(lambda ranks=ranks: not any(rank.is_running() for rank in ranks), seconds=60)
    return moments


def _wait(process: subprocess.Popen[str], condition: Any) -> None:
    wait_for(lambda: process.poll() is not None or condition(), seconds=180)
