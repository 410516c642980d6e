import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import NonFiniteError
from trainer.callbacks import NonFiniteGuard


def stand_in(*, norm: float | None, applied: bool) -> Any:
    handle = SimpleNamespace(grad_norm=lambda: norm, was_update_applied=lambda: applied)
    return SimpleNamespace(models={"student": handle}, global_step=6)


def test_skipped_updates_in_a_row_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    guard, trainer = NonFiniteGuard(max_skipped=2), stand_in(norm=math.inf, applied=False)

    guard.on_after_optimizer_step(trainer, None, "student")
    guard.on_after_optimizer_step(trainer, None, "student")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "step 7" in caplog.text

    with pytest.raises(NonFiniteError, match=r"step 7: the last 3 updates of models\.student.*optimizer\.lr"):
        guard.on_after_optimizer_step(trainer, None, "student")


def test_a_good_update_starts_the_count_anew() -> None:
    guard = NonFiniteGuard(max_skipped=1)

    for _ in range(3):
        guard.on_after_optimizer_step(stand_in(norm=math.inf, applied=False), None, "student")
        guard.on_after_optimizer_step(stand_in(norm=1.0, applied=True), None, "student")

    assert guard.state_dict() == {"skipped": {"student": 0}}


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_an_applied_non_finite_update_ends_the_run_at_once(norm: float) -> None:
    with pytest.raises(NonFiniteError, match="its weights are lost"):
        NonFiniteGuard().on_after_optimizer_step(stand_in(norm=norm, applied=True), None, "student")


def test_the_count_survives_a_restart() -> None:
    guard, trainer = NonFiniteGuard(max_skipped=1), stand_in(norm=math.inf, applied=False)
    guard.on_after_optimizer_step(trainer, None, "student")

    resumed = NonFiniteGuard(max_skipped=1)
    resumed.load_state_dict(guard.state_dict())

    with pytest.raises(NonFiniteError):
        resumed.on_after_optimizer_step(trainer, None, "student")
