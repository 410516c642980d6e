"""Starts the ranks of a run on this machine, watches them, and joins what another launcher has started."""

import faulthandler
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from trainer.causes import FAILED as FAILED
from trainer.causes import INTERRUPTED as INTERRUPTED
from trainer.causes import REFUSED as REFUSED
from trainer.causes import REPORT, Cause, find_cause, read_reports, stack_file, was_interrupted
from trainer.causes import TERMINATED as TERMINATED
from trainer.causes import report_end as report_end
from trainer.redact import redact
from trainer.saving.checkpoints import FOLDER as CHECKPOINTS
from trainer.saving.checkpoints import find_all
from trainer.signals import SaveNote, raise_terminated
from trainer.signals import Terminated as Terminated

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

RUN_FOLDER = "TRAINER_RUN_FOLDER"  # given to the ranks that this file starts: where all of them write
_LAUNCHER = "TRAINER_LAUNCHER"  # and whose death they follow: a process id

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0  # for ranks that fail together to say so
_GRACE_SECONDS = 8.0  # then for the others to write their summary, once they are told
_CLOSE_SECONDS = 10  # between SIGTERM and SIGKILL, for ranks that hang in a collective
_SAVE_SECONDS = 300.0  # for an interrupted run to save; a second Ctrl-C ends it at once
_TAIL_LINES = 20

_RESUME = re.compile(r"\+{0,2}resume=")
_RESUMES = re.compile(r"\+{0,2}resume=(?!(null|~|\"\"|''|)$)")  # and names something

# Held back in a rank until `raise_on_signals` has set what they do: by default they would kill it.
_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class PeerFailed(RuntimeError):
    """Raised in a rank when the launcher tells it that another one has failed: the run fails, it is not interrupted."""


def raise_on_signals() -> None:
    """Makes SIGTERM raise Terminated, the launcher's SIGUSR2 raise PeerFailed, and SIGUSR1 wait for `deferred`."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, raise_terminated)
    signal.signal(signal.SIGUSR1, SaveNote())
    if is_own_rank():
        signal.signal(signal.SIGUSR2, _raise_peer_failed)
        # Before the handler of Python, which a rank that waits in C code never reaches.
        file = stack_file().open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False, chain=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _raise_peer_failed(number: int, frame: FrameType | None) -> None:
    raise PeerFailed("another rank failed")


def is_rank() -> bool:
    """Returns whether a launcher, this one or another, has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_own_rank() -> bool:
    """Returns whether `start_ranks` has started this process."""
    return RUN_FOLDER in os.environ and is_rank()


def is_first_here() -> bool:
    """Returns whether this process speaks for its machine: all ranks of it find the same problems."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def is_main() -> bool:
    """Returns whether this process is rank 0, or no rank yet."""
    return os.environ.get("RANK", "0") == "0"


def count_processes(wanted: int | None) -> int:
    """Returns how many ranks to start: as many as wanted, else one for each visible GPU, else one."""
    return wanted or max(1, count_gpus())


def planned_ranks(wanted: int | None) -> int:
    """Returns how many ranks the run will have: those that another launcher has started, else those to start."""
    return int(os.environ["WORLD_SIZE"]) if is_rank() else count_processes(wanted)


def count_gpus() -> int:
    """Returns the number of visible GPUs; torch is asked only where the machine has one."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def start_ranks(
    command: Sequence[str],
    *,
    count: int,
    folder: Path,
    max_restarts: int = 0,
    again: Callable[[], Sequence[str]] | None = None,
) -> int:
    """Runs the command on `count` ranks and returns the exit status; the first failure ends all.

    Rank 0 writes to the terminal. What the others write is shown only when it explains why the run failed.

    Args:
        max_restarts: How often ranks that failed are started again.
        again: Returns the command for that; absent: the same one.
    """
    with _noted() as asked:
        for attempt in range(max_restarts + 1):
            if attempt and again is not None:
                command = again()
            cause = _run_once(command, count, folder=folder, asked=asked)
            if cause is None or cause.status != FAILED or asked.stops or attempt == max_restarts or cause.comes_again:
                break
            _tell_restart(f"{cause.headline.rstrip('.')}; restart {attempt + 1} of {max_restarts}", folder)
    if cause is None:
        return 0
    say(cause.text)
    return cause.status


def _tell_restart(text: str, folder: Path) -> None:
    """Says why the ranks are started again and where they begin, in the run's log as well."""
    saved = find_all(folder / CHECKPOINTS)
    text += f" from {saved[0].name}" if saved else " from the beginning"
    say(text)
    with suppress(OSError), (folder / "run.log").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} WARNING trainer.launch: {redact(text)}\n")


def go_on(argv: Sequence[str], folder: Path) -> list[str]:
    """Returns the command line of a run that was cut short, such that it goes on in its folder.

    A checkpoint of another run that it started from is given again as long as it has none of its own.
    """
    place = re.compile(r"\+{0,2}hydra\.run\.dir=")
    words = [word for word in argv if not place.match(word)]
    if find_all(folder / CHECKPOINTS) or not any(_RESUMES.match(word) for word in words):
        words = [*(word for word in words if not _RESUME.match(word)), "resume=auto"]
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return [*words, f'hydra.run.dir="{quoted}"']


def _run_once(command: Sequence[str], count: int, *, folder: Path, asked: "Asked") -> Cause | None:
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    from trainer.distributed import loopback_store

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = loopback_store()  # in this process: no rank hosts one
    with TemporaryDirectory(prefix="trainer-ranks-") as files:
        # Or torch would set its own, which raise in the middle of what is done here.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        with _held_back():
            context = start_processes(
                "rank",
                entrypoint=command[0],
                args=dict.fromkeys(range(count), tuple(command[1:])),
                envs={
                    rank: _environment(rank, count, port=store.port, folder=folder, files=files)
                    for rank in range(count)
                },
                logs_specs=DefaultLogsSpecs(
                    files, redirects={rank: Std.ALL if rank else Std.NONE for rank in range(count)}
                ),
            )
        ranks = Ranks(context, Path(files))
        try:
            ranks.wait(asked)
        finally:
            ranks.close()
        return ranks.explain(asked)


@contextmanager
def _held_back() -> Iterator[None]:
    """Lets the processes that are started in the body begin with those signals pending instead of fatal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(rank: int, count: int, *, port: int, folder: Path, files: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the store is the launcher's
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # or it listens where the host's name leads
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        RUN_FOLDER: str(folder),
        REPORT: str(Path(files, f"{rank}.json")),
        _LAUNCHER: str(os.getpid()),
    }


@dataclass
class Asked:
    """What signals have asked of the launcher; noted at once, acted on where it looks."""

    stops: list[int] = field(default_factory=list)  # SIGTERM or SIGINT, each time
    save: bool = False


@contextmanager
def _noted() -> Iterator[Asked]:
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            asked.save = True
        else:
            asked.stops.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    # Ignored: by nohup, for one.
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    note_before = before.get(signal.SIGUSR1)
    asked.save = isinstance(note_before, SaveNote) and note_before.take()
    try:
        for number in before:
            signal.signal(number, note)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Ranks:
    """The processes of a run, from their start to the word on why they ended."""

    def __init__(self, context: "PContext", files: Path) -> None:
        self.context = context
        self.files = files
        self.processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}  # type: ignore[attr-defined]
        self.ended: dict[int, int] = {}  # rank to exit code, in the order of their ends
        self._interrupted_at: float | None = None  # when the first of them was seen to have ended so
        self._is_late = False

    def wait(self, asked: Asked) -> None:
        """Returns when all ranks have ended, or some time after the first of them has failed."""
        handed_on, deadline = 0, math.inf
        while not self._have_ended() and not self._has_failed() and not self._is_late:
            if asked.save:
                asked.save = False
                self._send(signal.SIGUSR1)
            if not handed_on and (number := self._asked_to_stop(asked)):
                handed_on, deadline = number, time.monotonic() + _SAVE_SECONDS
                self._send(number)
            if len(asked.stops) > 1:
                say("interrupted again: ended without saving")
                # The other one: a rank takes the same signal, soon after the first, for its echo.
                self._send(signal.SIGTERM if handed_on == signal.SIGINT else signal.SIGINT)
                self._wait_until(time.monotonic() + _GRACE_SECONDS)
                return
            time.sleep(_POLL_SECONDS)
            self._is_late = time.monotonic() > deadline
        self._wait_until(time.monotonic() + _REPORT_SECONDS)
        self._send(signal.SIGUSR2)
        self._wait_until(time.monotonic() + _GRACE_SECONDS)

    def _asked_to_stop(self, asked: Asked) -> int:
        """Returns the signal to hand on: the launcher's own, or that which has ended one rank and not the others."""
        if asked.stops:
            return asked.stops[0]
        statuses = [*self.ended.values(), *(report.status for report in read_reports(self.files).values())]
        interrupted = [status for status in statuses if was_interrupted(status)]
        if not interrupted:
            return 0
        self._interrupted_at = self._interrupted_at or time.monotonic()
        if time.monotonic() < self._interrupted_at + _GRACE_SECONDS:  # all may have saved, and end one by one
            return 0
        return signal.SIGINT if interrupted[0] in (INTERRUPTED, -signal.SIGINT) else signal.SIGTERM

    def _has_failed(self) -> bool:
        reports = read_reports(self.files).values()
        codes = (code for code in self.ended.values() if code and not was_interrupted(code))
        return any(codes) or any(not was_interrupted(report.status) for report in reports)

    def _have_ended(self) -> bool:
        self._poll()
        return len(self.ended) == len(self.processes)

    def _wait_until(self, deadline: float) -> None:
        while not self._have_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _send(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def _poll(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode

    def close(self) -> None:
        """Leaves no process behind, not even a worker of a rank's data loader."""
        self.context.close(signal.SIGTERM, timeout=_CLOSE_SECONDS)
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
            except ProcessLookupError:
                continue

    def explain(self, asked: Asked) -> Cause | None:
        """Returns why the run did not end well; None if it did."""
        cause = find_cause(self.ended, count=len(self.processes), folder=self.files, tail=self._tail)
        if cause is None or not asked.stops:
            return cause
        name = signal.Signals(asked.stops[0]).name
        if self._is_late:
            text = f"error: not all ranks have saved and ended within {_SAVE_SECONDS:.0f} s of {name}\n{cause.text}"
            return Cause(status=FAILED, headline=cause.headline, text=text)
        if len(asked.stops) == 1 and not was_interrupted(cause.status):
            return cause
        return Cause(status=INTERRUPTED if name == "SIGINT" else TERMINATED, headline=name, text="")

    def _tail(self, rank: int) -> str:
        if rank == 0:  # has written to the terminal
            return ""
        path = Path(self.context.stderrs[rank])
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(["; its last lines:", *lines]) if lines else ""


def end_with_launcher() -> None:
    """Ends this rank when the launcher is gone, even by SIGKILL, so that no orphan stays."""
    launcher = int(os.environ[_LAUNCHER])

    def watch() -> None:
        # Or the kernel may give them to this thread and not wake the main one, which alone handles them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVE_SECONDS)
        os._exit(TERMINATED)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def requeue() -> None:
    """Puts the Slurm job of this process, if it is in one, back into the queue."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        say(f"warning: launch.requeue: scontrol requeue {job} failed: {said}")
    else:
        say(f"job {job} is queued again")


def say(text: str) -> None:
    """Tells the user something, without secrets."""
    if text:
        with suppress(OSError):  # nobody can be told, and the exit status still is
            sys.stderr.write(redact(text).rstrip() + "\n")
            sys.stderr.flush()
