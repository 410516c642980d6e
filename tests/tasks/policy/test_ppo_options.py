"""The options of PPO's losses and of its KL: defaults, and everything that is wrong at once."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.policy.ppo_options import KLOptions, LossOptions, read_options
from trainer import ConfigError


def test_what_is_left_out_has_its_default() -> None:
    assert read_options(LossOptions, {"value_clip": None}, key="task.loss") == LossOptions(value_clip=None)
    assert read_options(KLOptions, {}, key="task.kl") == KLOptions()
    assert KLOptions(target=4.0, gain=0.3).controller.after(1.0, kl=400.0) == pytest.approx(1.06)


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        (
            LossOptions,
            {"clip_low": 1.0, "clip_high": 0, "value_clip": 0, "entropy_weight": -1},
            ["clip_low=1.0: must be a number between 0 and 1", "clip_high=0", "value_clip=0", "entropy_weight=-1"],
        ),
        (
            KLOptions,
            {"weight": "much", "place": "both", "estimator": "k4", "target": 0, "gain": 5},
            ["weight='much': must be a number of at least 0", "place='both': must be reward or loss", "estimator='k4'",
             "target=0: must be a number above 0, or null", "gain=5: must be a number between 0 and 5"],
        ),
        (KLOptions, {"wieght": 1.0}, ["wieght is unknown, only weight, place, estimator, target, gain; did you mean"]),
        (KLOptions, {"estimator": ["k1"]}, ["estimator=['k1']: must be one of k1, k2, k3"]),
    ],
)  # fmt: skip
def test_all_wrong_values_are_refused_together(kind: Any, values: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_options(kind, values, key="task.x")

    assert len(refused.value.problems) == len(found)
    for problem, expected in zip(refused.value.problems, found, strict=True):
        assert problem.startswith(f"task.x.{expected}")


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.kl=0.1: must be a mapping"):
        read_options(KLOptions, 0.1, key="task.kl")
