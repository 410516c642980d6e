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
