import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.callbacks import EarlyStopping
from trainer.config import ConfigError


def validate(callback: EarlyStopping, values: list[float], *, last_step: int = 100) -> tuple[int, str | None]:
    """Returns after how many validations it stopped, and why."""
    trainer: Any = SimpleNamespace(global_step=0, last_step=last_step, stop_reason=None)
    for count, value in enumerate(values, 1):
        callback.on_validation_end(trainer, None, {"val/loss": value, "val/accuracy": value})
        trainer.global_step += 10
        if trainer.stop_reason is not None:
            return count, trainer.stop_reason
    return len(values), None


def test_it_stops_after_patience_validations_without_improvement() -> None:
    count, reason = validate(EarlyStopping(monitor="val/loss", patience=2), [3.0, 2.0, 2.5, 2.1, 1.0])

    assert count == 4
    assert reason == "val/loss has not improved on 2 for 2 validations (now 2.1)"


def test_a_run_that_would_never_be_stopped_is_refused() -> None:
    trainer: Any = SimpleNamespace(val_every=None)

    with pytest.raises(ConfigError, match="val_every=null: callbacks"):
        EarlyStopping(monitor="val/loss").on_fit_start(trainer, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "stops_after"),
    [("max", 0.0, [0.5, 0.6, 0.6], 3), ("min", 0.1, [1.0, 0.95], 2), ("min", 0.0, [1.0, 0.95], None)],
)
def test_improvement_follows_mode_and_min_delta(
    mode: str, min_delta: float, values: list[float], stops_after: int | None
) -> None:
    count, reason = validate(EarlyStopping(monitor="val/loss", mode=mode, patience=1, min_delta=min_delta), values)

    assert (count if reason else None) == stops_after


def test_nan_stops_at_once() -> None:
    assert validate(EarlyStopping(monitor="val/loss"), [1.0, math.nan]) == (2, "val/loss is NaN at step 10")


def test_the_last_validation_stops_nothing() -> None:
    assert validate(EarlyStopping(monitor="val/loss", patience=1), [1.0, 2.0], last_step=10) == (2, None)


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"monitor=val/los is no metric.*did you mean val/loss"):
        validate(EarlyStopping(monitor="val/los"), [1.0])


@pytest.mark.parametrize("wrong", [{"mode": "low"}, {"patience": 0}, {"min_delta": -0.1}, {"min_delta": float("nan")}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="early_stopping"):
        EarlyStopping(monitor="val/loss", **wrong)


def test_the_count_survives_a_restart() -> None:
    first = EarlyStopping(monitor="val/loss", patience=2)
    validate(first, [1.0, 2.0])

    resumed = EarlyStopping(monitor="val/loss", patience=2)
    resumed.load_state_dict(first.state_dict())

    assert validate(resumed, [3.0])[1] is not None


def test_a_state_of_another_metric_is_not_taken_over() -> None:
    before = EarlyStopping(monitor="val/a")
    before.best, before.num_bad = 0.1, 2

    same, other = EarlyStopping(monitor="val/a"), EarlyStopping(monitor="val/b")
    for callback in (same, other):
        callback.load_state_dict(before.state_dict())

    assert (same.best, same.num_bad) == (0.1, 2)
    assert (other.best, other.num_bad) == (None, 0)
