import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from trainer.loggers import JsonlLogger


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_kind_of_a_step_is_one_object(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.start(folder=tmp_path, config={}, name="run")

    logger.log_metrics({"val/loss": 2.0}, step=0)
    logger.log_metrics({"train/loss": 1.0, "perf/step_time": 0.5, "val/loss": 1.5}, step=10)

    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/loss": 2.0},
        {"step": 10, "train/loss": 1.0, "perf/step_time": 0.5},
        {"step": 10, "val/loss": 1.5},
    ]


def test_a_new_log_keeps_what_is_there_and_nan_is_null(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, math.nan), (3, math.inf)):
        logger = JsonlLogger()
        logger.start(folder=tmp_path, config={}, name="run")
        logger.log_metrics({"train/loss": value}, step=step)
        logger.close(status="completed")

    assert [row["train/loss"] for row in read(tmp_path / "metrics.jsonl")] == [1.0, None, None]


def test_a_table_has_a_file_of_its_own(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.start(folder=tmp_path, config={}, name="run")

    logger.log_table("samples", columns=["prompt", "student"], rows=[["Who?", "Ich, natürlich.\n"]], step=4)
    logger.log_table("../val/samples", columns=["prompt"], rows=[["half a pair: \ud83d"]], step=4)

    assert read(tmp_path / "samples.jsonl") == [{"step": 4, "prompt": "Who?", "student": "Ich, natürlich.\n"}]
    assert read(tmp_path / ".._val_samples.jsonl") == [{"step": 4, "prompt": "half a pair: \ud83d"}]


def test_a_failure_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = JsonlLogger()
    logger.start(folder=tmp_path / "missing", config={}, name="run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.close(status="failed")

    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "metrics.jsonl is off for the rest of this run" in warning.getMessage()


# Resumed runs --------------------------------------------------------------------------------------------------------


def started(folder: Path, position: Mapping[str, int] | None) -> JsonlLogger:
    folder.mkdir(exist_ok=True)
    logger = JsonlLogger()
    logger.start(folder=folder, config={}, name="run", position=position)
    return logger


def log_steps(logger: JsonlLogger, steps: Iterable[int]) -> None:
    """Logs as a run does: numbers each step, one table from step 2 on and another from step 5 on."""
    for step in steps:
        logger.log_metrics({"train/loss": 1 / step, "val/loss": 2 / step}, step=step)
        if step >= 2:
            logger.log_table("samples", columns=["text"], rows=[[f"ä {step}"], ["b"]], step=step)
        if step >= 5:
            logger.log_table("late", columns=["text"], rows=[["c"]], step=step)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.jsonl"))}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    log_steps(started(tmp_path / "undisturbed", None), range(1, 9))
    return contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("checkpoint", [0, 1, 3, 6])
def test_a_resumed_log_equals_an_undisturbed_one_after_a_kill_in_a_line(
    checkpoint: int, tmp_path: Path, undisturbed: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    first = started(folder, None)
    log_steps(first, range(1, checkpoint + 1))
    position = first.position()
    log_steps(first, range(checkpoint + 1, 8))
    for name in ("metrics.jsonl", "samples.jsonl", "late.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"step": 8, "train/lo')

    log_steps(started(folder, json.loads(json.dumps(position))), range(checkpoint + 1, 9))

    assert contents(folder) == undisturbed
    assert warnings_of(caplog) == []


def test_a_second_resume_equals_an_undisturbed_run(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    first = started(tmp_path / "run", None)
    log_steps(first, [1])
    position = first.position()
    log_steps(first, range(2, 7))
    second = started(tmp_path / "run", position)
    log_steps(second, range(2, 4))
    position = second.position()
    log_steps(second, range(4, 8))

    log_steps(started(tmp_path / "run", position), range(4, 9))

    assert contents(tmp_path / "run") == undisturbed


def test_nothing_stays_of_an_attempt_before_a_fresh_start_but_the_users_files(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    log_steps(started(tmp_path / "run", None), range(1, 7))
    (tmp_path / "run" / "mine.jsonl").write_text("{}")

    fresh = started(tmp_path / "run", {})
    assert contents(tmp_path / "run") == {"metrics.jsonl": b"", "mine.jsonl": b"{}"}
    log_steps(fresh, range(1, 9))

    assert contents(tmp_path / "run") == {**undisturbed, "mine.jsonl": b"{}"}


def test_lost_lines_are_one_warning_and_the_log_goes_on_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(tmp_path / "run", None)
    log_steps(first, range(1, 6))
    position = first.position()
    (tmp_path / "run" / "samples.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b'{"step": 1, "train/loss": 1.0}\n{"step": 2, "tr')

    log_steps(started(tmp_path / "run", position), [6])

    assert [row["step"] for row in read(tmp_path / "run" / "metrics.jsonl")] == [1, 6, 6]
    assert [row["step"] for row in read(tmp_path / "run" / "samples.jsonl")] == [6, 6]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("metrics.jsonl, samples.jsonl: shorter than when the checkpoint was saved")


def test_a_new_log_cuts_a_half_line(tmp_path: Path) -> None:
    log_steps(started(tmp_path / "run", None), [1])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(b'{"st')

    log_steps(started(tmp_path / "run", None), [2])

    assert [row["step"] for row in read(tmp_path / "run" / "metrics.jsonl")] == [1, 1, 2, 2]
    assert [row["step"] for row in read(tmp_path / "run" / "samples.jsonl")] == [2, 2]


def test_a_position_reaches_no_file_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("a: 1\n")

    started(tmp_path / "run", {"../other.jsonl": 0, str(tmp_path / "other.jsonl"): 0, "../config.yaml": 0})

    assert (tmp_path / "other.jsonl").read_text() == "{}\n"
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"


FULL = """
import sys
from pathlib import Path
from trainer.loggers import JsonlLogger

folder, step = Path(sys.argv[1]), int(sys.argv[2])
logger = JsonlLogger()
logger.start(folder=folder, config={}, name="run", position=None if step == 1 else {"metrics.jsonl": int(sys.argv[3])})
for number in range(step, step + 100):
    logger.log_metrics({"train/loss": 0.1}, step=number)
print(logger.position()["metrics.jsonl"])
logger.close(status="completed")
"""


def test_a_full_disk_is_one_warning_and_leaves_whole_lines(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", sys.executable, "-c", FULL, str(tmp_path), "1"]
    full = subprocess.run(limited, capture_output=True, text=True, check=True)
    position = int(full.stdout)
    whole = len(read(tmp_path / "metrics.jsonl"))
    free = [sys.executable, "-c", FULL, str(tmp_path), str(whole + 1), str(position)]
    subprocess.run(free, capture_output=True, text=True, check=True)

    assert full.stderr.count("is off for the rest of this run") == 1
    assert 10 < whole < 100
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == list(range(1, whole + 101))
