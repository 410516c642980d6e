import io
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich

from trainer.outputs import quiet_third_parties, setup_logging, write_summary


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, console = root.handlers[:], root.level, rich.get_console().__dict__.copy()
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(False)
    logging.getLogger("DeepSpeed").filters.clear()
    root.handlers[:], root.level = handlers, level
    rich.get_console().__dict__ = console


def test_rank_0_logs_to_stderr_and_with_times_to_run_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None, is_main=True)
    setup_logging(tmp_path, is_main=True)
    log = logging.getLogger("my_package.task")
    long_line = "a line longer than any terminal, [not] markup " * 5

    log.info(long_line)
    log.warning("beware of %d", 3)
    log.info("for the file", extra={"file_only": True})

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"{long_line.rstrip()}\nwarning: beware of 3\n"
    written = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in written] == [
        f"INFO my_package.task: {long_line}",
        "WARNING my_package.task: beware of 3",
        "INFO my_package.task: for the file",
    ]


def test_other_ranks_show_warnings_with_their_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    setup_logging(tmp_path, is_main=False)

    logging.getLogger("trainer").info("of no interest")
    logging.getLogger("trainer").warning("a fact about this rank")

    assert capsys.readouterr().err == "[rank 1] warning: a fact about this rank\n"
    assert not (tmp_path / "run.log").exists()


def test_chatter_stays_in_run_log_and_errors_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path, is_main=True)

    quiet_third_parties()
    quiet_third_parties()
    logger = logging.getLogger("DeepSpeed")  # as DeepSpeed sets it up when it is imported
    own = logging.StreamHandler(io.StringIO())
    logger.addHandler(own)
    logger.propagate = False
    logger.warning("Setting accelerator to CPU")
    logger.error("out of memory")
    logging.getLogger("httpx").info("HTTP Request: GET")
    logging.getLogger("transformers.generation").warning("The following generation flags are not valid: top_p")
    logging.getLogger("transformers.modeling").warning("Some weights were newly initialized")
    logger.removeHandler(own)

    shown = capsys.readouterr().err.splitlines()
    assert shown == ["error: out of memory", "warning: Some weights were newly initialized"]
    assert own.stream.getvalue() == ""
    assert (tmp_path / "run.log").read_text().count("Setting accelerator to CPU") == 1


def test_only_warnings_that_are_known_to_be_harmless_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(None, is_main=True)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        quiet_third_parties()
        setup_logging(None, is_main=True)

        text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use `all_gather_single` instead."
        warnings.warn(text, FutureWarning, stacklevel=1)
        warnings.warn("lr_scheduler.step() before optimizer.step()", UserWarning, stacklevel=1)

    shown = capsys.readouterr().err
    assert "is deprecated" not in shown
    assert "UserWarning: lr_scheduler.step()" in shown


def test_without_a_gpu_deepspeed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    quiet_third_parties()
    assert os.environ["DS_ACCELERATOR"] == "cpu"

    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    quiet_third_parties()
    assert "DS_ACCELERATOR" not in os.environ


def test_the_summary_is_valid_json_in_one_piece(tmp_path: Path) -> None:
    write_summary(
        tmp_path,
        task="distill",
        status="failed",
        global_step=3,
        seconds=1.23456,
        before={"val/loss": 2.0},
        after={"val/loss": math.nan, "val/perplexity": math.inf},
        reference={},
        gap_closed={"val/loss": 0.25},
    )

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "task": "distill",
        "status": "failed",
        "global_step": 3,
        "seconds": 1.235,
        "before": {"val/loss": 2.0},
        "after": {"val/loss": None, "val/perplexity": None},
        "reference": {},
        "gap_closed": {"val/loss": 0.25},
    }
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
