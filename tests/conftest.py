"""What holds for all tests."""

import os
from collections.abc import Iterator

import pytest

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER += ("TORCHELASTIC_USE_AGENT_STORE",)
AT_START = {name: os.environ.get(name) for name in LAUNCHER}


@pytest.fixture(autouse=True)
def no_launcher_left() -> Iterator[None]:
    """Takes back what a trainer in this process set for its only rank, or later command lines would see a launcher."""
    yield
    for name, value in AT_START.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
