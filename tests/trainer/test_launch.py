"""Starting ranks: one failure ends the run, its cause is shown once, and nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer import launch

# What a rank does: `main` of the entry point around a body, without the weight of a real run.
RANK = """
import os, signal, sys, time, traceback
from trainer import launch
from trainer.__main__ import _failed, _interrupted, refuse
launch.raise_on_signals()
launch.end_with_launcher()
rank, folder = int(os.environ["RANK"]), os.environ["OUT"]
open(f"{folder}/{rank}.pid", "w").write(str(os.getpid()))
def body():
    BODY
try:
    body()
    status = 0
except KeyboardInterrupt as interrupt:
    open(f"{folder}/{rank}.interrupted", "w").write(type(interrupt).__name__)
    status = _interrupted(interrupt)
except (Exception, SystemExit):
    status = _failed()
sys.exit(status)
"""
LAUNCHER = """
import sys
from pathlib import Path
from trainer import launch
sys.exit(launch.start_ranks([sys.executable, sys.argv[1]], count=2, folder=Path("outputs/x")))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns where a test writes what its ranks do; signal handlers are as before afterwards."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(launch.__file__).parents[1]))  # where the package is not installed
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield tmp_path / "rank.py"
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(script: Path, body: str) -> tuple[int, float]:
    """Returns the exit status of two ranks that run the body, and the seconds that it took."""
    script.write_text(RANK.replace("BODY", body.strip().replace("\n", "\n    ")))
    begin = time.monotonic()
    status = launch.start_ranks([sys.executable, str(script)], count=2, folder=Path("outputs/x"))
    return status, time.monotonic() - begin


def is_alive(folder: Path, rank: int) -> bool:
    try:
        os.kill(int((folder / f"{rank}.pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_get_their_place_folder_and_threads(script: Path, capfd: pytest.CaptureFixture[str]):
    body = """
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", launch.RUN_FOLDER]
print(*(os.environ[name] for name in names), flush=True)
"""
    status, _ = start(script, body)

    out, err = capfd.readouterr()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert status == 0
    assert out == f"0 0 2 127.0.0.1 {threads} outputs/x\n", "of rank 0 alone"
    assert err == ""


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "error: rank 1 was killed by SIGKILL"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("print('last words', file=sys.stderr, flush=True); os._exit(5)", "last words"),
    ],
)
def test_a_rank_that_dies_ends_the_run_with_its_error_once(
    script: Path, capfd: pytest.CaptureFixture[str], body: str, shown: str
):
    status, seconds = start(script, f"if rank == 1:\n    {body}\ntime.sleep(1000)")

    _, err = capfd.readouterr()
    assert status == 1
    assert seconds < 30
    assert err.count(shown) == 1, err
    assert "rank 1" in err
    assert "another rank failed" not in err
    assert "elastic" not in err
    assert not is_alive(script.parent, 0)
    assert not (script.parent / "0.interrupted").exists(), "rank 0 failed with it; nobody interrupted it"


def test_the_cause_is_shown_and_not_what_the_others_say_of_it(script: Path, capfd: pytest.CaptureFixture[str]):
    body = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
    status, seconds = start(script, body)

    _, err = capfd.readouterr()
    assert (status, seconds < 30) == (1, True)
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err


def test_a_refusal_of_all_ranks_is_printed_once(script: Path, capfd: pytest.CaptureFixture[str]):
    status, _ = start(script, "sys.exit(refuse(['data.train=x: no such file']))")

    assert status == 2
    assert capfd.readouterr().err == "error: data.train=x: no such file\n"


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGTERM, 143, "Terminated"), (signal.SIGINT, 130, "KeyboardInterrupt")]
)
def test_a_signal_to_the_launcher_reaches_the_ranks(script: Path, number: signal.Signals, status: int, name: str):
    process = _launcher(script)

    process.send_signal(number)

    assert process.wait(timeout=30) == status
    for rank in (0, 1):
        assert (script.parent / f"{rank}.interrupted").read_text() == name
        assert not is_alive(script.parent, rank)


def test_no_rank_outlives_a_launcher_that_was_killed(script: Path):
    process = _launcher(script)

    process.kill()
    process.wait()

    deadline = time.monotonic() + 15
    while any(is_alive(script.parent, rank) for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _launcher(script: Path) -> subprocess.Popen[bytes]:
    script.write_text(RANK.replace("BODY", "time.sleep(1000)"))
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(script)])
    deadline = time.monotonic() + 60
    while not all((script.parent / f"{rank}.pid").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_one_process_is_started_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    assert launch.count_processes(None) == 1
    assert launch.count_processes(3) == 3

    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    assert launch.count_processes(None) == 8
    assert launch.count_processes(1) == 1
