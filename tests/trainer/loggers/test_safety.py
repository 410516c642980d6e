import logging

import pytest

from trainer.loggers.safety import Fuse


def test_an_interrupt_passes_the_fuse() -> None:
    fuse = Fuse("wandb")

    with pytest.raises(KeyboardInterrupt), fuse.guard("logging"):
        raise KeyboardInterrupt
    assert not fuse.is_blown


def test_only_the_first_failure_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fuse = Fuse("wandb")

    for what in ("logging", "finishing"):
        with fuse.guard(what):
            raise OSError("disk full")

    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "logging failed (OSError: disk full); the run goes on" in warning.getMessage()
