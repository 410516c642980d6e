"""Why a run of several ranks failed: what each rank says of its end, where it stood, and which of them is the cause."""

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

REFUSED, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143

REPORT = "TRAINER_RANK_REPORT"  # where a rank says how it ended

_FRAMES = 20  # of a rank's stack are shown

# What a rank says when another one is gone: never the cause.
_SECONDARY = re.compile(
    r"connection (reset|closed|refused)|broken pipe|closed by peer|socket closed|gloo|nccl|process ?group|"
    r"dist(backend|network|store)error|tcpstore|recvvalue|unhandled system error|another rank failed",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"memoryerror|out of ?memory|(can't|cannot) allocate memory|bad_alloc", re.IGNORECASE)
# As both a traceback and faulthandler write it.
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)


@dataclass(kw_only=True)
class Report:
    """How a rank ended, written by the rank itself."""

    status: int
    text: str  # a traceback, or one line per problem
    time: float


@dataclass(kw_only=True)
class Cause:
    """Why a run ended without success."""

    status: int
    headline: str  # which rank, and what with it, in one line
    text: str  # all that there is to say

    @property
    def comes_again(self) -> bool:
        """Whether the run would come to the same end if it were started again."""
        return re.search(r"^(\w+\.)*(NonFiniteError|ExportError): ", self.text, re.MULTILINE) is not None


def report_end(status: int, text: str) -> None:
    """Tells the launcher how this rank ended; the first report counts."""
    path = Path(os.environ[REPORT])
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(Report(status=status, text=text, time=time.time()))), encoding="utf-8")
    part.rename(path)  # whole or not at all: the launcher reads it any time


def stack_file() -> Path:
    """Returns where this rank writes its stack when the launcher tells it that another one has failed."""
    return Path(os.environ[REPORT]).with_suffix(".stack")


def read_reports(folder: Path) -> dict[int, Report]:
    """Returns the reports that are there, by rank."""
    return {int(path.stem): Report(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")}


def was_interrupted(code: int) -> bool:
    """Returns whether this exit code, or status of a report, says that SIGTERM or SIGINT has ended a rank."""
    return code in (INTERRUPTED, TERMINATED, -signal.SIGINT, -signal.SIGTERM)


def find_cause(ended: Mapping[int, int], *, count: int, folder: Path, tail: Callable[[int], str]) -> Cause | None:
    """Returns why the run failed; None if it did not.

    Args:
        ended: Rank to exit code, in the order of their ends.
        folder: Where the ranks have left their reports and stacks.
        tail: Returns the last lines that a rank has written.
    """
    reports = read_reports(folder)
    if not any(ended.values()) and not reports and len(ended) == count:
        return None
    rank, report = _first(ended, reports)
    others = "; the other ranks were stopped" if count > 1 else ""
    if report is None:
        code = ended.get(rank)
        headline = f"rank {rank} " + ("did not end" if code is None else _describe_end(code))
        status = FAILED if code is None or not was_interrupted(code) else _status_of(code)
        where = _places([], folder, skip=-1 if code is None else rank) if code in (None, -signal.SIGABRT) else ""
        return Cause(status=status, headline=headline, text=f"error: {headline}{others}{tail(rank)}{where}")
    if was_interrupted(report.status):
        headline = f"rank {rank} was interrupted"
        return Cause(status=report.status, headline=headline, text=headline + others)
    if report.status == REFUSED:
        return Cause(status=REFUSED, headline=f"rank {rank} refused its configuration", text=report.text)
    message = _message(report.text)
    why = " (out of memory)" if _OUT_OF_MEMORY.search(message) else ""
    where = _places(_frames(report.text), folder, skip=rank) if _is_secondary(report) else ""
    headline = f"rank {rank} failed{why}: {message.partition(chr(10))[0]}"
    return Cause(status=FAILED, headline=headline, text=f"rank {rank} failed{why}:\n{report.text.rstrip()}{where}")


def _first(ended: Mapping[int, int], reports: Mapping[int, Report]) -> tuple[int, Report | None]:
    """Returns the rank whose end explains the others', and what it said.

    Its own error that is not about its peers; a death without a word; an interrupt; a silent end that looks like
    success; the first error about peers. Of several the first.
    """
    said = sorted(reports.items(), key=lambda item: item[1].time)
    own = [(rank, report) for rank, report in said if not was_interrupted(report.status) and not _is_secondary(report)]
    silent = [(rank, None) for rank in ended if rank not in reports]
    died = [(rank, None) for rank, _ in silent if ended[rank] and not was_interrupted(ended[rank])]
    interrupted = [(rank, report) for rank, report in said if was_interrupted(report.status)]
    silent.sort(key=lambda item: ended[item[0]] == 0)
    candidates: list[tuple[int, Report | None]] = [*own, *died, *interrupted, *silent, *said]
    return candidates[0] if candidates else (0, None)


def _status_of(code: int) -> int:
    return INTERRUPTED if code in (INTERRUPTED, -signal.SIGINT) else TERMINATED


def _is_secondary(report: Report) -> bool:
    return report.status == FAILED and bool(_SECONDARY.search(_message(report.text)))


def _message(text: str) -> str:
    """Returns what follows a traceback's last frame: the error's type and what it says, notes included."""
    lines = text.strip().splitlines()
    last = max((index for index, line in enumerate(lines) if _FRAME.match(line)), default=-1)
    return "\n".join(line for line in lines[last + 1 :] if not line.startswith("    ")) or text.strip()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended early with exit status {code}"
    name = signal.Signals(-code).name
    why = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{why}"


# --- where ranks stood


def _places(cause: list[traceback.FrameSummary], folder: Path, *, skip: int) -> str:
    """Returns where the other ranks stood; the stacks of those that were elsewhere, for which it waited in vain.

    Args:
        cause: Where the rank that gave up stood.
        skip: Which one that is.
    """
    stood: dict[str, list[int]] = {}
    reports = read_reports(folder)
    for rank in sorted({int(path.stem) for path in folder.glob("*.stack")} - {skip}):
        own = _stack(folder / f"{rank}.stack") or (_frames(reports[rank].text) if rank in reports else [])
        if not own:
            continue
        if cause and set(_keys(cause)) <= set(_keys(own)):
            stood.setdefault("the same place", []).append(rank)
        else:
            place = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
            shown = "".join(traceback.format_list(own[-_FRAMES:])).rstrip()
            stood.setdefault(f"{place}; its stack, most recent call last:\n{shown}", []).append(rank)
    return "".join(f"\n\n{_name(ranks)} stood at {text}" for text, ranks in stood.items())


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _keys(frames: list[traceback.FrameSummary]) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in frames]


def _stack(path: Path) -> list[traceback.FrameSummary]:
    return _frames(path.read_text(encoding="utf-8", errors="replace"))[::-1]  # faulthandler begins with the innermost


def _frames(text: str) -> list[traceback.FrameSummary]:
    """Returns the frames of the last traceback of a text, in its order."""
    last = text.rpartition("Traceback (most recent call last):")[2]
    return [traceback.FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(last)]
