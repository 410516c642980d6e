"""Starts the ranks of a run on this machine, watches them, and joins what another launcher has started."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

REFUSED, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143

RUN_FOLDER = "TRAINER_RUN_FOLDER"  # given to the ranks that this file starts: where all of them write
_REPORT = "TRAINER_RANK_REPORT"  # where each says how it ended
_LAUNCHER = "TRAINER_LAUNCHER"  # and whose death they follow: a process id

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0  # for ranks that fail together to say so
_GRACE_SECONDS = 8.0  # then for the others to write their summary, once they are told
_CLOSE_SECONDS = 10  # between SIGTERM and SIGKILL, for ranks that hang in a collective
_SAVE_SECONDS = 300.0  # for an interrupted run to save; a second Ctrl-C ends it at once
_TAIL_LINES = 20

# What a rank says when another one is gone: never the cause.
_SECONDARY = re.compile(
    r"connection (reset|closed|refused)|broken pipe|closed by peer|socket closed|gloo|nccl|process ?group|"
    r"dist(backend|network|store)error|tcpstore|recvvalue|unhandled system error|another rank failed",
    re.IGNORECASE,
)


class Terminated(KeyboardInterrupt):
    """The run was asked to end by SIGTERM; handled like Ctrl-C, with another exit status."""


class PeerFailed(RuntimeError):
    """Raised in a rank when the launcher tells it that another one has failed: the run fails, it is not interrupted."""


@dataclass(kw_only=True)
class Report:
    """How a rank ended, written by the rank itself."""

    status: int
    text: str  # a traceback, or one line per problem
    time: float


def raise_on_signals() -> None:
    """Makes SIGTERM raise Terminated, and the launcher's word PeerFailed, in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_terminated)
        if is_own_rank():
            signal.signal(signal.SIGUSR1, _raise_peer_failed)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(f"signal {number}")


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


def start_ranks(command: Sequence[str], *, count: int, folder: Path) -> int:
    """Runs the command on `count` ranks and returns the exit status; the first failure ends all.

    Rank 0 writes to the terminal. What the others write is shown only when it explains why the run failed.
    """
    import logging

    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # In this process and on a port that the system picks, so that two runs never race for one.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory(prefix="trainer-ranks-") as files:
        context = start_processes(
            "rank",
            entrypoint=command[0],
            args=dict.fromkeys(range(count), tuple(command[1:])),
            envs={
                rank: _environment(rank, count, port=store.port, folder=folder, files=files) for rank in range(count)
            },
            logs_specs=DefaultLogsSpecs(
                files, redirects={rank: Std.ALL if rank else Std.NONE for rank in range(count)}
            ),
        )
        ranks = Ranks(context, Path(files))
        try:
            ranks.wait()
        except SignalException as error:
            number = signal.SIGINT if error.sigval == signal.SIGINT else signal.SIGTERM
            ranks.interrupt(number)
            return INTERRUPTED if number == signal.SIGINT else TERMINATED
        finally:
            ranks.close()
        return ranks.explain()


def _environment(rank: int, count: int, *, port: int, folder: Path, files: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),  # the store is the launcher's: no rank hosts one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        RUN_FOLDER: str(folder),
        _REPORT: str(Path(files, f"{rank}.json")),
        _LAUNCHER: str(os.getpid()),
    }


class Ranks:
    """The processes of a run, from their start to the word on why they ended."""

    def __init__(self, context: "PContext", files: Path) -> None:
        self.context = context
        self.files = files
        self.processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}  # type: ignore[attr-defined]
        self.ended: dict[int, int] = {}  # rank to exit code, in the order of their ends

    def wait(self) -> None:
        """Returns when all ranks have ended, or some time after the first of them has failed."""
        while not self._have_ended() and not any(self.ended.values()) and not self._reports():
            time.sleep(_POLL_SECONDS)
        self._wait_until(time.monotonic() + _REPORT_SECONDS)
        self._send(signal.SIGUSR1)
        self._wait_until(time.monotonic() + _GRACE_SECONDS)

    def _have_ended(self) -> bool:
        self._poll()
        return len(self.ended) == len(self.processes)

    def _wait_until(self, deadline: float) -> None:
        while not self._have_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def _poll(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode

    def interrupt(self, number: signal.Signals) -> None:
        """Hands a signal on and waits until the ranks have saved; a second signal ends them at once."""
        from torch.distributed.elastic.multiprocessing import SignalException

        self._send(number)
        try:
            self._wait_until(time.monotonic() + _SAVE_SECONDS)
        except SignalException:
            _say("interrupted again: ended without saving")

    def close(self) -> None:
        """Leaves no process behind, not even a worker of a rank's data loader."""
        from torch.distributed.elastic.multiprocessing import SignalException

        with suppress(SignalException):  # the answer to a second Ctrl-C is what follows
            self.context.close(signal.SIGTERM, timeout=_CLOSE_SECONDS)
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
            except ProcessLookupError:
                continue

    def explain(self) -> int:
        """Says once why the run failed, and returns its exit status."""
        if not any(self.ended.values()) and not self._reports() and len(self.ended) == len(self.processes):
            return 0
        rank, report = self._find_cause()
        if report is None:
            tail = "" if rank == 0 else self._tail(rank)
            _say(f"error: rank {rank} {_describe_end(self.ended[rank])}; the other ranks were stopped{tail}")
            return FAILED
        if report.status in (INTERRUPTED, TERMINATED):
            _say(f"rank {rank} was interrupted; the other ranks were stopped")
        else:
            _say(report.text if report.status == REFUSED else f"rank {rank} failed:\n{report.text}")
        return report.status

    def _find_cause(self) -> tuple[int, Report | None]:
        """A rank's own error that is not about its peers; else one that died without a word; else the first error."""
        reports = sorted(self._reports().items(), key=lambda item: item[1].time)
        own = [(rank, report) for rank, report in reports if not _is_secondary(report)]
        silent = [rank for rank in self.ended if rank not in dict(reports)]
        silent.sort(key=lambda rank: self.ended[rank] == 0)
        if own:
            return own[0]
        if silent:
            return silent[0], None
        return reports[0]

    def _reports(self) -> dict[int, Report]:
        found = {}
        for rank in self.processes:
            path = self.files / f"{rank}.json"
            if path.is_file():
                found[rank] = Report(**json.loads(path.read_text(encoding="utf-8")))
        return found

    def _tail(self, rank: int) -> str:
        path = Path(self.context.stderrs[rank])
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(["; its last lines:", *lines]) if lines else ""


def _is_secondary(report: Report) -> bool:
    lines = report.text.strip().splitlines()
    return bool(lines) and report.status == FAILED and bool(_SECONDARY.search(report.text[-2000:]))


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended early with exit status {code}"
    name = signal.Signals(-code).name
    why = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{why}"


def report_end(status: int, text: str) -> None:
    """Tells the launcher how this rank ended; the first report counts."""
    path = Path(os.environ[_REPORT])
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(Report(status=status, text=text, time=time.time()))), encoding="utf-8")
    part.rename(path)  # whole or not at all: the launcher reads it any time


def end_with_launcher() -> None:
    """Ends this rank when the launcher is gone, even by SIGKILL, so that no orphan stays."""
    launcher = int(os.environ[_LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_CLOSE_SECONDS)
        os._exit(TERMINATED)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()
