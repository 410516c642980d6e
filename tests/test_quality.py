"""Lint, format and types, as tests, so that the README's one line runs them, too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check --diff", "mypy"])
def test_finds_nothing(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, f"{command}\n{result.stdout[-6000:]}{result.stderr[-2000:]}"
