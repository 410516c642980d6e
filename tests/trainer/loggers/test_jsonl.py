import json
import logging
import math
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


def test_a_resumed_run_appends_and_nan_is_null(tmp_path: Path) -> None:
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

    assert read(tmp_path / "samples.jsonl") == [{"step": 4, "prompt": "Who?", "student": "Ich, natürlich.\n"}]


def test_a_failure_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = JsonlLogger()
    logger.start(folder=tmp_path / "missing", config={}, name="run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.close(status="failed")

    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "metrics.jsonl is off for the rest of this run" in warning.getMessage()
