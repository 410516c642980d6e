import logging
import time

import pytest

from trainer.heartbeat import sign_of_life


def test_something_slow_is_told_about_and_something_fast_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    with sign_of_life("loading", every_seconds=0.1):
        time.sleep(0.01)
    assert caplog.messages == []

    with sign_of_life("loading", every_seconds=0.1):
        time.sleep(0.3)
    assert caplog.messages[0] == "loading ... 0 s"
