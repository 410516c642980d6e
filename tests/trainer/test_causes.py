"""Which of several ranks is the cause of a failure, from what they left behind; test_launch.py has real ones."""

import json
import signal
from pathlib import Path

import pytest

from trainer.causes import Cause, find_cause

TIMEOUT = """Traceback (most recent call last):
  File "/task.py", line 7, in step
    all_reduce(loss)
    ^^^^^^^^^^^^^^^^
  File "/distributed.py", line 90, in all_reduce
    work.wait()
RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete
"""
OWN = """Traceback (most recent call last):
  File "/home/gloo/task.py", line 3, in step
    raise ValueError("of the data")
ValueError: of the data
row 7
"""
# As faulthandler writes it: the innermost first.
WAITING = """Stack (most recent call first):
  File "/distributed.py", line 90 in all_reduce
  File "/task.py", line 7 in step
"""
READING = """Stack (most recent call first):
  File "/data.py", line 4 in read
  File "/task.py", line 5 in step
"""


def cause_of(
    folder: Path,
    ended: dict[int, int],
    *,
    reports: dict[int, tuple[int, str]] | None = None,
    stacks: dict[int, str] | None = None,
    count: int = 4,
) -> Cause | None:
    """Returns the cause; reports were written in their order."""
    for time, (rank, (status, text)) in enumerate((reports or {}).items()):
        (folder / f"{rank}.json").write_text(json.dumps({"status": status, "text": text, "time": time}))
    for rank in range(count):
        (folder / f"{rank}.stack").write_text((stacks or {}).get(rank, ""))
    return find_cause(ended, count=count, folder=folder, tail=lambda rank: "")


def test_ranks_that_waited_alike_are_told_from_the_one_they_waited_for(tmp_path: Path):
    cause = cause_of(
        tmp_path,
        {0: 1},
        reports={0: (1, TIMEOUT), 2: (1, "PeerFailed: another rank failed")},
        stacks={1: WAITING, 2: READING, 3: WAITING},
    )

    assert cause is not None
    report, *stood = cause.text.split("\n\n")
    assert report == f"rank 0 failed:\n{TIMEOUT.rstrip()}"
    assert stood[0] == "ranks 1, 3 stood at the same place"
    assert stood[1] == (
        "rank 2 stood at /data.py:4 in read; its stack, most recent call last:\n"
        '  File "/task.py", line 5, in step\n  File "/data.py", line 4, in read'
    )


def test_a_rank_that_timed_out_elsewhere_before_it_was_told_is_shown_too(tmp_path: Path):
    elsewhere = TIMEOUT.replace("line 7", "line 20")

    cause = cause_of(tmp_path, {0: 1, 1: 1}, reports={0: (1, TIMEOUT), 1: (1, elsewhere)}, count=2)

    assert cause is not None
    assert 'File "/task.py", line 20, in step' in cause.text.partition("rank 1 stood at /distributed.py:90")[2]


def test_an_abort_shows_where_the_others_stood(tmp_path: Path):  # what NCCL's watchdog does to a rank that waits
    cause = cause_of(tmp_path, {0: -signal.SIGABRT}, stacks={1: READING}, count=2)

    assert cause is not None
    assert cause.headline == "rank 0 was killed by SIGABRT"
    assert "rank 1 stood at /data.py:4 in read" in cause.text


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_of_its_own_is_the_cause_whatever_its_files_are_called(tmp_path: Path, first: int):
    reports = {first: (1, OWN if first else TIMEOUT), 1 - first: (1, TIMEOUT if first else OWN)}

    cause = cause_of(tmp_path, {0: 1, 1: 1}, reports=reports, stacks={0: WAITING}, count=2)

    assert cause is not None
    assert (cause.status, cause.headline) == (1, "rank 1 failed: ValueError: of the data")
    assert cause.text == f"rank 1 failed:\n{OWN.rstrip()}", "nobody asks where the others stood"


@pytest.mark.parametrize(
    "message",
    [
        "MemoryError",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_out_of_memory_is_named(tmp_path: Path, message: str):
    text = OWN.replace("ValueError: of the data\nrow 7", message)

    cause = cause_of(tmp_path, {1: 1}, reports={1: (1, text)}, count=2)

    assert cause is not None
    assert cause.headline == f"rank 1 failed (out of memory): {message}"


def test_success_has_no_cause(tmp_path: Path):
    assert cause_of(tmp_path, {1: 0, 0: 0}, count=2) is None


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("trainer.task.NonFiniteError: the loss of first is nan", True),
        ("trainer.export.ExportError: student scores otherwise", True),
        ("RuntimeError: a NonFiniteError: of a peer", False),
        ("OSError: disk full", False),
    ],
)
def test_what_would_end_the_same_way_is_not_started_again(error: str, again: bool):
    cause = Cause(status=1, headline="", text=f"rank 0 failed:\nTraceback (most recent call last):\n{error}")

    assert cause.comes_again is again
