"""From a source (file, embedded text, hub name) to rows, and what is wrong with it before anything loads."""

import csv
import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.rows import Row, find_format_problem, find_row_problem

log = logging.getLogger(__name__)

EMBEDDED = "embedded:"
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # suffix -> builder of `datasets`
SUFFIXES = (".txt", *BUILDERS)

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_TEXT_COLUMNS = ("text", "prompt", "completion", "chosen", "rejected", "document")
_BLANK_LINES = re.compile(r"\n\s*\n")


def load_rows(source: str, *, split: str = "train", prepare: Callable[[Row], Row] | None = None) -> list[Row]:
    """Returns the rows of a file, of an embedded text or of a hub dataset, checked one by one.

    Args:
        source: A .txt file (documents between blank lines), .jsonl, .json, .csv or .parquet file,
            `embedded:<name>`, or a hub name `org/name` or `org/name:config`.
        split: Of a hub dataset; a file has no splits.
        prepare: Makes the rows that are returned, instead of the check for text; see `RowReader`.
    """
    problems = check_source("source", source)
    if problems:
        raise ConfigError(*problems)
    if source.startswith(EMBEDDED):
        lines = _embedded_files()[source.removeprefix(EMBEDDED)].read_text(encoding="utf-8").splitlines()
        rows: Iterable[Row] = [json.loads(line) for line in lines]
    elif _is_file_name(source):
        return _load_file(source, prepare)
    else:
        rows = _rows_of_hub(source, split=split)
    return list(_checked(rows, source, prepare))


def _load_file(source: str, prepare: Callable[[Row], Row] | None) -> list[Row]:
    try:
        return list(_checked(_rows_of_file(Path(source).expanduser()), source, prepare))
    except UnicodeDecodeError as error:  # from any reader, some of them only when a row is taken
        raise ConfigError(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror or error}") from error


def check_source(key: str, source: str) -> list[str]:
    """Returns what is wrong with a source's name, without loading it; `key` is where the user wrote it."""
    if source.startswith(EMBEDDED):
        return _check_embedded(key, source)
    if _is_file_name(source):
        return _check_file(key, source)
    if _HUB_NAME.fullmatch(source):
        return []
    return [
        (
            f"{key}={source} is neither a file ({', '.join(SUFFIXES)}), nor embedded:<name>, nor a hub name "
            f"(org/name or org/name:config){_near(source, [path.name for path in Path().iterdir()])}"
        )
    ]


def _is_file_name(source: str) -> bool:
    path = Path(source).expanduser()
    if path.exists() or path.suffix.lower() in SUFFIXES or path.is_absolute() or source.startswith("."):
        return True
    # "data/train.jsn" has the form of a hub name; a folder of that name here says that a file was meant.
    return path.suffix != "" and path.parent.is_dir()


def _check_file(key: str, source: str) -> list[str]:
    path = Path(source).expanduser()
    if not path.parent.is_dir():
        return [f"{key}={source}: the folder {path.parent} does not exist (seen from {Path.cwd()})"]
    if not path.exists():
        return [f"{key}={source}: no such file{_near(path.name, [entry.name for entry in path.parent.iterdir()])}"]
    if path.is_dir():
        return [f"{key}={source} is a folder; give one file ({', '.join(SUFFIXES)})"]
    if path.suffix.lower() not in SUFFIXES:
        return [f"{key}={source}: unknown suffix {path.suffix!r}; known are {', '.join(SUFFIXES)}"]
    if path.stat().st_size == 0:
        return [f"{key}={source} is empty; at least one row is needed"]
    return []


def _check_embedded(key: str, source: str) -> list[str]:
    names = list(_embedded_files())
    name = source.removeprefix(EMBEDDED)
    if name in names:
        return []
    near = _near(name, names) or f"; known are {', '.join(names)}"
    return [f"{key}={source}: no embedded text of that name{near}"]


def _embedded_files() -> dict[str, Traversable]:
    """Returns name -> file: chatterbot_english.jsonl is known as chatterbot-english."""
    entries = sorted(files("trainer").joinpath("embedded").iterdir(), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".jsonl").replace("_", "-"): entry for entry in entries if entry.name.endswith(".jsonl")
    }


def _near(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _rows_of_file(path: Path) -> Iterable[Row]:
    if path.suffix.lower() == ".txt":
        return _rows_of_text(path)
    import datasets  # here: it takes a second that a run on embedded text need not wait

    builder = BUILDERS[path.suffix.lower()]
    if builder == "json" and _begins_with_null(path):
        raise ConfigError(f"{path}, row 1: expected a JSON object, found null")
    options = _csv_options(path) if builder == "csv" else {}
    try:
        with _quiet_datasets():
            rows = datasets.load_dataset(
                builder, data_files=str(path), split="train", cache_dir=_cache_folder(), **options
            )
    except UnicodeDecodeError:
        raise
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ConfigError(_find_broken_line(path) or f"{path} cannot be read: {_root_cause(error)}") from error
    if "__index_level_0__" in rows.column_names:  # pandas takes what is too much for row labels
        raise ConfigError(f"{path}, row 1: expected as many fields as the header has, found more")
    return (dict(row) for row in rows)


def _rows_of_text(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8-sig")
    return [{"text": document.strip()} for document in _BLANK_LINES.split(text) if document.strip()]


def _begins_with_null(path: Path) -> bool:
    """Returns whether the first value is null, at which pyarrow ends the process by a segmentation fault."""
    with path.open("rb") as file:
        return file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"null")


def _csv_options(path: Path) -> dict[str, Any]:
    """Returns options that keep text as written: an answer "42" or "None" is no number and no gap."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns = next(csv.reader(file), [])
    texts = [column for column in columns if column in _TEXT_COLUMNS]
    return {"converters": dict.fromkeys(texts, str), "keep_default_na": False, "na_values": [""]}


def _rows_of_hub(source: str, *, split: str) -> Iterable[Row]:
    import datasets

    name, _, config = source.partition(":")
    log.info("loading %s, split %s, from the hub", source, split)
    try:
        rows = datasets.load_dataset(name, config or None, split=split, cache_dir=_cache_folder())
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ConfigError(
            f"{source}, split {split}, cannot be loaded from the hub ({_root_cause(error)}); "
            f"without a network give a file ({', '.join(SUFFIXES)}) or embedded:<name>"
        ) from error
    return (dict(row) for row in rows)


def _cache_folder() -> str | None:
    """Returns where `datasets` keeps its tables; None is its own default, below the user's home."""
    cache = os.environ.get("TRAINER_CACHE")
    return str(Path(cache) / "datasets") if cache else None


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Hides progress bars and logged tracebacks: a broken file is reported in one line here."""
    import datasets

    were_hidden, level = datasets.are_progress_bars_disabled(), datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not were_hidden:
            datasets.enable_progress_bars()


def _checked(rows: Iterable[Row], source: str, prepare: Callable[[Row], Row] | None) -> Iterator[Row]:
    first: Row | None = None
    for index, row in enumerate(rows):
        # `datasets` gives every row every column: what a line did not have is None.
        row = {name: value for name, value in row.items() if value is not None}
        first = first or row
        try:
            row = prepare(row) if prepare is not None else _text_row(row, first)
        except ConfigError as error:
            raise ConfigError(f"{source}, {_place(source, index)}: {error}") from error
        yield row
    if first is None:
        raise ConfigError(f"{source} holds no rows")


def _text_row(row: Row, first: Row) -> Row:
    problem = find_row_problem(row) or find_format_problem(row, first)
    if problem:
        raise ConfigError(problem)
    return row


def _place(source: str, index: int) -> str:
    path = Path(source).expanduser()
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return f"row {index + 1}"
    with path.open(encoding="utf-8-sig") as file:
        numbers = [number for number, line in enumerate(file, start=1) if line.strip()]
    return f"line {numbers[index]}"


def _find_broken_line(path: Path) -> str | None:
    if path.suffix.lower() != ".jsonl":
        return None
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"{path}, line {number}: expected one JSON object a line, found {_short(line)} ({error.msg})"
            if not isinstance(row, dict):
                return f"{path}, line {number}: expected one JSON object a line, found {_short(line)}"
            problem = find_row_problem(row) if row else None
            if problem:
                return f"{path}, line {number}: {problem}"
    return None


def _short(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else line[:60] + "...")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
