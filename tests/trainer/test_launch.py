"""Starting ranks: one failure ends the run, its cause is shown once, and nobody is left behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from trainer import __main__ as entry
from trainer import check, launch, signals
from trainer.compose import Composition

# What a rank does: `main` of the entry point around a body, without the weight of a real run.
RANK = """
import json, os, signal, sys, threading, time, traceback
from trainer import launch
from trainer.__main__ import _failed, _interrupted, refuse
from trainer.signals import deferred, error_of
launch.raise_on_signals()
launch.end_with_launcher()
rank, folder = int(os.environ["RANK"]), os.environ["OUT"]
open(f"{folder}/{rank}.pid", "w").write(str(os.getpid()))
def save():  # as the trainer does, when it is asked to stop
    with deferred() as requests:
        open(f"{folder}/{rank}.runs", "w").close()
        while not requests.stop:
            time.sleep(0.01)
        time.sleep(0.5)
        open(f"{folder}/{rank}.saved", "w").close()
        raise error_of(requests.take())
def body():
    BODY
try:
    body()
    status = 0
except KeyboardInterrupt as interrupt:
    open(f"{folder}/{rank}.interrupted", "w").write(type(interrupt).__name__)
    status = _interrupted(interrupt)
except (Exception, SystemExit) as error:
    open(f"{folder}/{rank}.failed", "w").write(type(error).__name__)
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
    """Returns where a test writes what its ranks do; signal handlers are those of a foreground job, and stay so."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(launch.__file__).parents[1]))  # where the package is not installed
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    # A test that runs in the background, or under nohup, ignores these.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handlers = [signal.getsignal(number) for number in numbers]
    yield tmp_path / "rank.py"
    assert [signal.getsignal(number) for number in numbers] == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


def start(
    script: Path,
    body: str,
    *,
    count: int = 2,
    max_restarts: int = 0,
    again: Callable[[], list[str]] | None = None,
    interrupt: Callable[[], None] | None = None,
) -> tuple[int, float]:
    """Returns the exit status of ranks that run the body, and the seconds that it took.

    Args:
        interrupt: Called in a thread meanwhile.
    """
    write(script, body)
    begin = time.monotonic()
    command, folder = [sys.executable, str(script)], Path("outputs/x")
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    status = launch.start_ranks(command, count=count, folder=folder, max_restarts=max_restarts, again=again)
    thread.join()
    return status, time.monotonic() - begin


def write(script: Path, body: str) -> None:
    script.write_text(RANK.replace("BODY", body.strip().replace("\n", "\n    ")))


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.05)


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
        ("os.kill(os.getpid(), signal.SIGKILL)", "error: rank 1 was killed by SIGKILL (out of memory, or killed by"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1)); bytearray(1 << 31)",
            "rank 1 failed (out of memory):",
        ),
        ("sys.exit(0)", "SystemExit: 0"),
        ("print('last words', file=sys.stderr, flush=True); os._exit(5)", "last words"),
    ],
)
def test_a_rank_that_dies_ends_the_run_with_its_error_once(
    script: Path, capfd: pytest.CaptureFixture[str], body: str, shown: str
):
    status, seconds = start(script, f"if rank == 1:\n    {body}\nwith deferred():\n    time.sleep(1000)")

    _, err = capfd.readouterr()
    assert status == 1
    assert seconds < 30
    assert err.count(shown) == 1, err
    assert "rank 1" in err
    assert "another rank failed" not in err
    assert "elastic" not in err
    assert not is_alive(script.parent, 0)
    assert (script.parent / "0.failed").read_text() == "PeerFailed", "not interrupted, and at once"


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


def test_a_hanging_rank_is_named_with_its_place(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)
    monkeypatch.setattr(launch, "_CLOSE_SECONDS", 1)
    body = """
import datetime, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
others = dist.new_group([0, 3], timeout=datetime.timedelta(seconds=1000))
dist.barrier()
if rank == 1:
    time.sleep(1000)  # asleep
if rank == 2:
    lock = threading.Lock()
    with lock:
        lock.acquire()  # locked
if rank == 3:
    dist.all_reduce(torch.ones(1), group=others)  # waiting
dist.all_reduce(torch.ones(1))
"""

    status, seconds = start(script, body, count=4)

    _, err = capfd.readouterr()
    lines = script.read_text().splitlines()
    line = {word: next(index for index, text in enumerate(lines, 1) if text.endswith(f"# {word}"))
            for word in ("asleep", "locked", "waiting")}  # fmt: skip
    first, *stood = err.split("\n\n")
    assert (status, seconds < 40) == (1, True)
    assert "rank 0 failed:\nTraceback" in first  # gloo's threads may have the first word
    assert "Timed out waiting 5000ms" in first
    assert len(stood) == 3, err
    assert stood[0].startswith(f"rank 1 stood at {script}:{line['asleep']} in body;")
    assert stood[1].startswith(f"rank 2 stood at {script}:{line['locked']} in body;")
    assert stood[2].startswith("rank 3 stood at ")
    assert "distributed_c10d.py:" in stood[2].partition("\n")[0], "in C code, below this"
    assert f'File "{script}", line {line["waiting"]}, in body' in stood[2]
    assert not any(is_alive(script.parent, rank) for rank in range(4))


def test_no_port_is_open_to_other_machines(script: Path, capfd: pytest.CaptureFixture[str]):
    look = """
import psutil, torch.distributed as dist
def listens(pid):
    return [each.laddr.ip for each in psutil.Process(pid).net_connections() if each.status == psutil.CONN_LISTEN]
"""
    body = """
dist.init_process_group("gloo")
dist.barrier()
shown = [listens(os.getpid()), listens(os.getppid()), os.environ["GLOO_SOCKET_IFNAME"]]
open(f"{folder}/{rank}.ports", "w").write(json.dumps(shown))
dist.barrier()
"""
    single = """
import json, os
from trainer.distributed import ensure_environment
ensure_environment()
for _ in range(2):  # the rendezvous is there for a second process group, too
    dist.init_process_group("gloo")
    dist.barrier()
    found = listens(os.getpid())
    dist.destroy_process_group()
print(json.dumps([found, os.environ["GLOO_SOCKET_IFNAME"]]))
"""
    before = listening()

    status, _ = start(script, look + body)
    alone = subprocess.run([sys.executable, "-c", look + single], capture_output=True, text=True, check=True)

    assert status == 0, capfd.readouterr().err
    for rank in (0, 1):
        own, launchers, interface = json.loads((script.parent / f"{rank}.ports").read_text())
        assert (set(own), interface) == ({"127.0.0.1"}, "lo")
        assert "127.0.0.1" in launchers
        assert len(launchers) == len(before) + 1
    own, interface = json.loads(alone.stdout)
    assert (set(own), interface) == ({"127.0.0.1"}, "lo")
    assert listening() == before, "closed again"


def listening() -> list[str]:
    return [str(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]


# --- signals


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGTERM, 143, "Terminated"), (signal.SIGINT, 130, "KeyboardInterrupt")]
)
def test_a_signal_to_the_launcher_reaches_the_ranks_which_save(
    script: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, status: int, name: str
):
    folder = script.parent

    def interrupt() -> None:
        wait_for(folder / "0.runs", folder / "1.runs")
        os.kill(os.getpid(), number)

    assert start(script, "save()", max_restarts=1, interrupt=interrupt)[0] == status, "and are not started again"

    for rank in (0, 1):
        assert (folder / f"{rank}.saved").exists()
        assert (folder / f"{rank}.interrupted").read_text() == name
        assert not is_alive(folder, rank)
    err = capfd.readouterr().err
    assert err == f"{number.name}: finishing this step, then saving; once more ends the run at once\n"


@pytest.mark.parametrize(
    ("mine", "others", "expected", "shown"),
    [
        ("raise OSError('disk full')", "time.sleep(1000)", 1, "rank 1 failed:\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)", 1, "error: rank 1 was killed by SIGKILL"),
        ("pass", "time.sleep(1000)", 1, "error: not all ranks have saved and ended within 3 s of SIGTERM\nrank "),
        ("return", "return", 0, ""),  # this was the last step
    ],
)
def test_an_interrupted_run_that_could_not_save_has_failed(
    script: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    mine: str,
    others: str,
    expected: int,
    shown: str,
):
    monkeypatch.setattr(launch, "_SAVE_SECONDS", 3.0)
    folder = script.parent
    body = f"""
with deferred() as requests:
    open(f"{{folder}}/{{rank}}.runs", "w").close()
    while not requests.stop:
        time.sleep(0.01)
    requests.take()
    if rank == 1:
        {mine}
    {others}
"""

    def interrupt() -> None:
        wait_for(folder / "0.runs", folder / "1.runs")
        os.kill(os.getpid(), signal.SIGTERM)

    status, seconds = start(script, body, max_restarts=1, interrupt=interrupt)

    err = capfd.readouterr().err
    assert (status, seconds < 15) == (expected, True), err
    assert "restart" not in err
    assert shown in err
    assert not any(is_alive(folder, rank) for rank in (0, 1))


def test_a_second_signal_ends_the_ranks_at_once(script: Path, capfd: pytest.CaptureFixture[str]):
    folder = script.parent

    def interrupt() -> None:
        wait_for(folder / "0.runs", folder / "1.runs")
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    body = 'with deferred():\n    open(f"{folder}/{rank}.runs", "w").close()\n    time.sleep(1000)'
    status, seconds = start(script, body, interrupt=interrupt)

    assert (status, seconds < 8) == (143, True)
    assert "interrupted again: ended without saving" in capfd.readouterr().err


def test_sigusr1_reaches_ranks_that_still_start_and_the_run_goes_on(script: Path):
    signal.raise_signal(signal.SIGUSR1)  # before they exist: they get it while Python itself starts

    body = """
for name in ("early", "late"):
    with deferred() as requests:
        open(f"{folder}/{rank}.{name}", "w").close()
        while not requests.save:
            time.sleep(0.01)
"""

    def ask_again() -> None:
        wait_for(*(script.parent / f"{rank}.late" for rank in (0, 1)))
        os.kill(os.getpid(), signal.SIGUSR1)

    status, _ = start(script, body, interrupt=ask_again)

    assert status == 0


@pytest.fixture(autouse=True)
def _survive_sigusr1() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signals.SaveNote())
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_rank_that_was_interrupted_alone_takes_the_others_with_it(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)

    status, seconds = start(script, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGTERM)\nsave()")

    assert (status, seconds < 10) == (143, True)
    assert (script.parent / "0.saved").exists()
    assert "rank 1 was interrupted; the other ranks were stopped" in capfd.readouterr().err


def test_no_rank_outlives_a_launcher_that_was_killed(script: Path):
    write(script, "save()")
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(script)])
    wait_for(*(script.parent / f"{rank}.runs" for rank in (0, 1)))

    process.kill()
    process.wait()

    deadline = time.monotonic() + 15
    while any(is_alive(script.parent, rank) for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (script.parent / "0.saved").exists()
    assert launch._SAVE_SECONDS >= 300, "the time that it has for that"


# --- restarts


def test_ranks_that_fail_are_started_again(script: Path, capfd: pytest.CaptureFixture[str]):
    body = """
attempt = len(sys.argv)
open(f"{folder}/{rank}.port{attempt}", "w").write(os.environ["MASTER_PORT"])
if attempt == 1 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2:
    raise ValueError("bad luck\\nin two lines")
"""
    argv, before = [sys.executable, str(script)], listening()

    def again() -> list[str]:
        argv.append("resume=auto")
        return argv

    status, _ = start(script, body, max_restarts=3, again=again)

    err = capfd.readouterr().err
    assert status == 0, err
    first, second = err.splitlines()
    assert first == (
        "rank 1 was killed by SIGKILL (out of memory, or killed by hand); restart 1 of 3 from the beginning"
    )
    assert re.fullmatch(r"rank [01] failed: ValueError: bad luck; restart 2 of 3 from the beginning", second)
    assert len({(script.parent / f"1.port{attempt}").read_text() for attempt in (1, 2, 3)}) == 3
    assert listening() == before
    assert not any(is_alive(script.parent, rank) for rank in (0, 1))


def test_the_last_failure_is_explained_and_a_refusal_is_final(script: Path, capfd: pytest.CaptureFixture[str]):
    failed, _ = start(script, "raise ValueError(f'bad luck {len(sys.argv)}')", count=1, max_restarts=1)
    err = capfd.readouterr().err
    refused, _ = start(script, "sys.exit(refuse(['data.train=x: no such file']))", count=1, max_restarts=3)

    assert failed == 1
    assert err.startswith("rank 0 failed: ValueError: bad luck 1; restart 1 of 1 from the beginning\n")
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: bad luck 1\n")
    assert (refused, capfd.readouterr().err) == (2, "error: data.train=x: no such file\n")


def test_a_restart_goes_on_in_its_folder(tmp_path: Path):
    argv = ["--config-dir", "conf", "task=line", "++hydra.run.dir=elsewhere", "resume=outputs/other"]
    folder = tmp_path / "a, b=1"

    fresh = launch.go_on(argv[:4], folder)
    branched = launch.go_on(argv, folder)
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    resumed = launch.go_on(argv, folder)

    place = f'hydra.run.dir="{folder}"'
    assert fresh == ["--config-dir", "conf", "task=line", "resume=auto", place]
    assert [launch.go_on([*argv[:4], f"resume={word}"], tmp_path)[3] for word in ("null", "", "~")] == [
        "resume=auto"
    ] * 3
    assert branched == ["--config-dir", "conf", "task=line", "resume=outputs/other", place], "no own one yet"
    assert resumed == fresh


@pytest.mark.parametrize("content", ["nothing", "its own", "of the run that goes on"])
def test_the_folder_is_known_before_the_ranks_start_and_goes_if_it_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
):
    folder = tmp_path / "outputs" / "run"
    if content == "of the run that goes on":
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    asked = {}

    def start_ranks(command: list[str], **settings: object) -> int:
        assert folder.is_dir()
        if content == "its own":
            (folder / "run.log").touch()
        asked.update(settings, command=command)
        return 7

    monkeypatch.setattr(launch, "start_ranks", start_ranks)

    status = entry._start_ranks(["task=line"], count=1, folder=folder, max_restarts=2)

    module = [sys.executable, "-m", "trainer"]
    assert status == 7
    assert (asked["folder"], asked["count"], asked["max_restarts"]) == (folder, 1, 2)
    assert asked["command"] == [*module, "task=line"]
    assert asked["again"]() == [*module, "task=line", "resume=auto", f'hydra.run.dir="{folder}"']
    assert folder.exists() == (content != "nothing")


def test_restarts_are_left_to_another_launcher(monkeypatch: pytest.MonkeyPatch):
    config = {"launch": {"num_processes": None, "max_restarts": 3}}
    monkeypatch.delenv("RANK", raising=False)
    assert list(check._check_launch(config)) == []

    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    (problem,) = check._check_launch(config)
    assert problem.startswith("launch.max_restarts=3: another launcher has started these ranks")
    assert "torchrun --max-restarts=3" in problem


# --- Slurm


@pytest.mark.parametrize(
    ("wanted", "job", "status", "rank", "is_queued"),
    [
        (True, "77", 143, None, True),
        (True, "77", 143, "0", True),  # of another launcher
        (True, "77", 143, "1", False),
        (True, "77", 130, None, False),
        (True, "77", 0, None, False),
        (True, None, 143, None, False),
        (False, "77", 143, None, False),
    ],
)
def test_a_terminated_run_is_queued_again_by_its_first_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    wanted: bool,
    job: str | None,
    status: int,
    rank: str | None,
    is_queued: bool,
):
    fake_scontrol(tmp_path, monkeypatch, f'echo "$@" >> {shlex.quote(str(tmp_path))}/calls')
    for name, value in (("SLURM_JOB_ID", job), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    cfg = OmegaConf.create({"launch": {"requeue": wanted}})
    composition = Composition(cfg=cfg, hydra=OmegaConf.create())
    monkeypatch.setattr(entry, "_compose_and_check", lambda request: composition)
    monkeypatch.setattr(entry, "_launch", lambda composition, argv: status)
    nothing = Namespace(overrides=[], config_path=None, config_name=None, config_dir=None)

    assert entry._run(nothing, []) == status

    calls = tmp_path / "calls"
    assert (calls.read_text() if calls.exists() else None) == ("requeue 77\n" if is_queued else None)
    assert ("job 77 is queued again" in capfd.readouterr().err) == is_queued


def test_a_requeue_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    fake_scontrol(tmp_path, monkeypatch, "echo Access denied >&2; exit 1")

    launch.requeue()
    monkeypatch.setenv("PATH", str(tmp_path / "gone"))
    launch.requeue()

    first, second = capfd.readouterr().err.splitlines()
    assert first == "warning: launch.requeue: scontrol requeue 77 failed: Access denied"
    assert second.startswith("warning: launch.requeue: scontrol requeue 77 failed: ")


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = folder / "bin" / "scontrol"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")


# --- how many


def test_one_process_is_started_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    assert launch.count_processes(None) == 1
    assert launch.count_processes(3) == 3

    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    assert launch.count_processes(None) == 8
    assert launch.count_processes(1) == 1
