"""The benchmark of distillation runs, and its contenders do the same work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.distill.kernels import LOSSES, measure
from tests.benchmarks.distill.measure import check_same_work


def test_kernels_compute_the_same_value_and_gradients() -> None:
    found = {name: measure(loss, num_tokens=40, vocabulary=600, repeats=1) for name, loss in LOSSES.items()}

    for key in ("value", "gradient of hidden", "gradient of head"):
        check_same_work(found, key, tolerance=1e-5)
    assert all(numbers["value"] > 0.5 for numbers in found.values())


def test_contenders_that_differ_are_refused() -> None:
    with pytest.raises(SystemExit, match="different work, value"):
        check_same_work({"one": {"value": 1.0}, "other": {"value": 1.1}}, "value", tolerance=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["kernels", "trainers", "cached", "quality"])
def test_benchmark_runs(benchmark: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.distill", benchmark, "--quick"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
