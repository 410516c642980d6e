"""How the runs of a sweep scored: one table of means and standard deviations over their seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.redact import redact, redact_word
from trainer.report import GAP_CLOSED, Rows, format_number, is_of_group, label_of, markdown_table
from trainer.saved import show
from trainer.saving.checkpoints import write_text

# Part of summary.json to the title of its column.
PARTS = {"before": "before", "after": "after", "reference": "reference", "gap_closed": GAP_CLOSED}
TITLE = "mean ± standard deviation"
_WIDE = 160  # columns where the output is no terminal


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a sweep that has ended."""

    number: int
    overrides: list[str]
    sweep: Path  # the folder of all its runs
    folder: Path
    status: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A metric over the runs that have it, in their order."""

    values: list[float]

    @property
    def mean(self) -> float:
        """A count, an int, if it is one of counts."""
        return statistics.mean(self.values)

    @property
    def std(self) -> float | None:
        """The standard deviation of a sample (n - 1); None for one value, which has no spread."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The runs of a sweep that differ in nothing but their seed.

    Args:
        overrides: What sets them apart from other settings of the sweep.
        jobs: All of them; those in `missing` failed or left no summary, and count nowhere.
        metrics: Part of summary.json to metric to its spread.
    """

    overrides: list[str]
    jobs: list[Job]
    missing: list[Job]
    metrics: dict[str, dict[str, Spread]]

    @property
    def num_runs(self) -> int:
        return len(self.jobs) - len(self.missing)

    @property
    def title(self) -> str:
        """What the runs have in common, their seeds, and how many there are."""
        seeds = [seed for job in self.jobs if (seed := seed_of(job)) is not None]
        words = [*map(redact_word, self.overrides), *([f"seed={','.join(seeds)}"] if seeds else [])]
        lost = f", without {' and '.join(f'job {job.number}' for job in self.missing)}" if self.missing else ""
        return redact(" ".join([*words, f"(n={self.num_runs}{lost})"]))


def report_spread(jobs: Sequence[Job]) -> None:
    """Prints the table of a sweep, and writes it to sweep.json and sweep.md; nothing if no run has any numbers."""
    settings = find_settings(jobs)
    if not any(setting.metrics for setting in settings):
        return
    columns, rows = spread_rows(settings)
    folder = jobs[0].sweep
    write_text(folder / "sweep.json", json.dumps(as_json(settings), indent=2, allow_nan=False) + "\n")
    write_text(folder / "sweep.md", f"{markdown_table([TITLE, *columns[1:]], rows)}\n")
    out = Console()  # stdout: the result, where stderr holds the log
    if not out.is_terminal:
        out.width = max(out.width, _WIDE)
    out.print()
    out.print(_table(columns, rows))
    out.print(f"written: {show(folder / 'sweep.json')}, {show(folder / 'sweep.md')}", highlight=False, soft_wrap=True)


def find_settings(jobs: Sequence[Job]) -> list[Setting]:
    """Returns the jobs by what they have in common besides the seed, in the order in which they ran."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        words = (word.lstrip("+") for word in job.overrides if not _is_seed(word))
        groups.setdefault(tuple(words), []).append(job)
    shared = set.intersection(*map(set, groups)) if groups else set()
    return [_setting([word for word in key if word not in shared], members) for key, members in groups.items()]


def _setting(overrides: list[str], jobs: list[Job]) -> Setting:
    summaries = {job.number: read_summary(job) for job in jobs}
    found = [summary for summary in summaries.values() if summary is not None]
    metrics: dict[str, dict[str, Spread]] = {}
    for part in PARTS:
        values: dict[str, list[float]] = {}
        for summary in found:
            for name, value in summary.get(part, {}).items():
                if value is not None:
                    values.setdefault(name, []).append(value)
        if values:
            metrics[part] = {name: Spread(values=measured) for name, measured in values.items()}
    missing = [job for job in jobs if summaries[job.number] is None]
    return Setting(overrides=overrides, jobs=jobs, missing=missing, metrics=metrics)


def read_summary(job: Job) -> Mapping[str, Any] | None:
    """Returns the numbers that a run left in summary.json, None of one that failed or left none that can be read."""
    if job.status != 0:
        return None
    try:
        summary: Mapping[str, Any] = json.loads((job.folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(summary, dict) and all(_are_numbers(summary.get(part, {})) for part in PARTS)
    return summary if is_whole else None


def _are_numbers(metrics: Any) -> bool:
    return isinstance(metrics, dict) and all(
        value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in metrics.values()
    )


def seed_of(job: Job) -> str | None:
    """Returns the seed that the sweep gave a job."""
    return next((word.partition("=")[2] for word in job.overrides if _is_seed(word)), None)


def _is_seed(word: str) -> bool:
    return word.lstrip("+").partition("=")[0] == "seed"


def as_json(settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns all numbers of a sweep, those of groups too, with each run's own."""
    return {"settings": [_setting_as_json(setting) for setting in settings]}


def _setting_as_json(setting: Setting) -> dict[str, Any]:
    jobs = [
        {"job": job.number, "seed": seed_of(job), "status": job.status, "folder": show(job.folder)}
        for job in setting.jobs
    ]
    return {
        "overrides": [redact(redact_word(word)) for word in setting.overrides],
        "n": setting.num_runs,
        "jobs": jobs,
        "missing": [job.number for job in setting.missing],
        **{
            part: {
                name: {"mean": spread.mean, "std": spread.std, "n": len(spread.values), "values": spread.values}
                for name, spread in setting.metrics.get(part, {}).items()
            }
            for part in PARTS
        },
    }


def spread_rows(settings: Sequence[Setting]) -> tuple[list[str], Rows]:
    """Returns the head and the rows of the table, as text: of each setting a line with its title, then its metrics."""
    parts = [part for part in PARTS if any(part in setting.metrics for setting in settings)]
    rows: Rows = []
    for setting in settings:
        rows.append([setting.title, *[""] * len(parts)])
        names = dict.fromkeys(name for part in parts for name in setting.metrics.get(part, {}))
        for name in (name for name in names if not is_of_group(name)):
            spreads = [setting.metrics.get(part, {}).get(name) for part in parts]
            cells = [_cell(spread, part, setting.num_runs) for spread, part in zip(spreads, parts, strict=True)]
            rows.append([label_of(name, {}), *cells])
    return ["", *(PARTS[part] for part in parts)], rows


def _cell(spread: Spread | None, part: str, num_runs: int) -> str:
    if spread is None:
        return ""
    numbers = [spread.mean] if spread.std is None else [spread.mean, spread.std]
    if part == "gap_closed":
        text = " ± ".join(f"{100 * number:.1f}" for number in numbers) + " %"
    else:
        text = " ± ".join(map(format_number, numbers))
    fewer = f" (n={len(spread.values)})" if len(spread.values) < num_runs else ""
    return f"{text}{fewer}"


def _table(columns: Sequence[str], rows: Rows) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column(TITLE, overflow="fold", max_width=60)
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        is_title = not any(row[1:])
        table.add_row(*map(escape, row), style="bold" if is_title else None)
    return table
