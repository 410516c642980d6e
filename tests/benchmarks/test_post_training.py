"""The benchmarks of post-training run, and their contenders do the same work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.post_training.__main__ import BENCHMARKS


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_benchmark_runs(benchmark: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.post_training", benchmark, "--quick"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
