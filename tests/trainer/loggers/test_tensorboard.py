import logging
from pathlib import Path

import pytest

from trainer.loggers import TensorBoardLogger


def test_scalars_tables_and_the_configuration_are_written_under_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger()
    logger.start(folder=tmp_path, config={"seed": 7, "hub": {"api_key": "xyz"}}, name="run")
    logger.log_metrics({"train/loss": 2.0, "val/loss": 3.0}, step=1)
    logger.log_metrics({"train/loss": 1.0}, step=2)
    logger.log_table("samples", columns=["prompt", "student"], rows=[["a|b", "c\nd"]], step=2)
    logger.close(status="completed")

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [event.value for event in events.Scalars("val/loss")] == [3.0]
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "seed: 7" in config
    assert "xyz" not in config
    table = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[-1] == "| a\\|b | c<br>d |"


def test_a_failure_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")

    logger = TensorBoardLogger()
    logger.start(folder=tmp_path, config={}, name="run")
    logger.log_metrics({"train/loss": 2.0}, step=1)
    logger.close(status="completed")

    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "TensorBoard is off" in warning.getMessage()


def steps_of(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def log_steps(folder: Path, steps: range, position: dict[str, int] | None, *, saved_at: int = 0) -> dict[str, int]:
    """Returns the position at a step."""
    logger, saved = TensorBoardLogger(), {}
    logger.start(folder=folder, config={}, name="run", position=position)
    for step in steps:
        logger.log_metrics({"train/loss": 1.0}, step=step)
        if step == saved_at:
            saved = logger.position()
    logger.close(status="failed")
    return saved


def test_a_resumed_log_shows_every_step_once_also_after_a_half_record(tmp_path: Path) -> None:
    position = log_steps(tmp_path, range(1, 8), None, saved_at=3)
    (file,) = (tmp_path / "tensorboard").glob("events.*")
    file.write_bytes(file.read_bytes()[:-7])

    position = log_steps(tmp_path, range(4, 8), position, saved_at=5)
    log_steps(tmp_path, range(6, 10), position)

    assert steps_of(tmp_path) == list(range(1, 10))


def test_nothing_stays_of_an_attempt_before_a_fresh_start(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8), None)

    log_steps(tmp_path, range(1, 4), {})

    assert steps_of(tmp_path) == [1, 2, 3]
