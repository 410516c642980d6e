"""Nothing lost: runs that are killed, interrupted and damaged end like one that nobody disturbed, or say why not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.trainer.trio_runs import (
    assert_same_run,
    kill_at_random,
    newest,
    num_lines,
    ranks_of,
    read_summary,
    run,
    shared_memory,
    start,
    wait_for,
)

STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    status, output = run(folder, "checkpoint.every=5")
    assert status == 0, output[-3000:]
    return folder


def soak(folder: Path, *overrides: str, kills: int, longest: float, seed: int) -> list[str]:
    """Lets ranks be killed until the run has come to its end; returns when each was."""
    memory, draw = shared_memory(), random.Random(seed)
    process = start(folder, "checkpoint.every=1", f"launch.max_restarts={kills + 2}", *overrides)
    moments = kill_at_random(process, folder, kills=kills, longest=longest, draw=draw)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    assert output.count("killed by SIGKILL") >= len(moments), output[-3000:]
    orphans = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]
    assert orphans == []
    assert shared_memory() <= memory
    return moments


def test_a_run_whose_ranks_are_killed_comes_to_the_same_end(undisturbed: Path, tmp_path: Path):
    moments = soak(tmp_path / "run", "task.step_seconds=0.1", kills=8, longest=3.0, seed=0)

    assert len(moments) == 8, "the run ended too early to be killed so often"
    assert_same_run(tmp_path / "run", undisturbed)


def test_sigterm_saves_the_step_and_a_resumed_run_ends_as_if_nothing_had_been(undisturbed: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(folder, "task.step_seconds=0.1")
    wait_for(lambda: num_lines(folder) > 5)

    ranks_of(process)[1].send_signal(signal.SIGTERM)  # one rank alone: all end together
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 143, output[-3000:]
    assert read_summary(folder)["status"] == "interrupted"
    step = int(newest(folder).name.removeprefix("step-"))
    assert read_summary(folder)["global_step"] == step
    status, output = run(folder, "resume=auto")
    assert status == 0, output[-3000:]
    assert f"resumed at step {step}" in output
    assert_same_run(folder, undisturbed)
