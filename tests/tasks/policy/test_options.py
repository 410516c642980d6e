"""The options of a policy gradient, and what is told of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.losses.policy import PolicyLoss
from tasks.policy.options import AdvantageOptions, KlOptions, read_advantages, read_kl, read_loss
from trainer import ConfigError


def test_what_is_not_given_is_the_default() -> None:
    assert read_loss(None, max_length=7) == PolicyLoss(max_length=7)
    assert read_loss({"ratio": "sequence", "clip_high": 0.28}, max_length=7).clip_high == 0.28
    assert read_kl(None) == KlOptions() and read_kl({"weight": 0.04}).weight == 0.04
    assert read_advantages({"scale": "none"}) == AdvantageOptions(scale="none")


@pytest.mark.parametrize(
    ("read", "values", "told"),
    [
        (read_loss, {"surrogate": "clp"}, "task.loss.surrogate='clp': must be one of clip, cispo, sapo, vespo"),
        (read_loss, {"normalisation": "grop"}, "did you mean grpo?"),
        (read_loss, {"clip_hgh": 0.2}, "task.loss.clip_hgh is no key of it; did you mean clip_high?"),
        (read_loss, {"max_length": 3}, "task.loss.max_length is no key"),
        (read_loss, {"clip_low": 0}, "task.loss.clip_low=0: must be a number above 0"),
        (read_loss, {"clip_low": 1.5}, "must be at most 1"),
        (read_loss, {"max_ratio": 1.1}, "task.loss.max_ratio=1.1: must be a number above 1 + clip_high"),
        (read_loss, {"surrogate": "vespo", "ratio": "sequence"}, "vespo has a ratio of its own"),
        (read_loss, 3, "task.loss is 3; it must be a mapping"),
        (read_kl, {"weight": -0.1}, "task.kl.weight=-0.1: must be a number of at least 0"),
        (read_kl, {"weight": True}, "task.kl.weight=True"),
        (read_kl, {"estimator": "k4"}, "must be one of k1, k2, k3"),
        (read_kl, {"weight": 0.1, "estimator": "k1"}, "its mean gradient is 0"),
        (read_kl, {"place": "rewards"}, "did you mean reward?"),
        (read_advantages, {"scale": "std"}, "task.advantages.scale='std': must be one of group, batch, none"),
        (read_advantages, {"baseline": "loo"}, "must be one of mean, leave_one_out"),
    ],
)
def test_a_wrong_option_is_told_with_its_key(read: Any, values: Any, told: str) -> None:
    arguments = {"max_length": 7} if read is read_loss else {}

    with pytest.raises(ConfigError) as error:
        read(values, **arguments)

    assert len(error.value.problems) == 1 and told in error.value.problems[0]


def test_k1_is_right_as_a_part_of_the_reward() -> None:
    assert read_kl({"weight": 0.1, "estimator": "k1", "place": "reward"}).place == "reward"
