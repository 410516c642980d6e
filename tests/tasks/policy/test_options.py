"""The options of a policy gradient, and what is told of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.losses.policy import PolicyLoss
from tasks.policy.options import (
    AdvantageOptions,
    KlOptions,
    PPOKlOptions,
    PPOLossOptions,
    read_advantages,
    read_drawn,
    read_kl,
    read_loss,
    read_ppo_kl,
    read_ppo_loss,
)
from trainer import ConfigError


def test_what_is_not_given_is_the_default() -> None:
    assert read_loss(None) == PolicyLoss()
    assert read_loss({"ratio": "sequence", "clip_high": 0.28}).clip_high == 0.28
    assert read_kl(None) == KlOptions() and read_kl({"weight": 0.04}).weight == 0.04
    assert read_advantages({"scale": "none"}) == AdvantageOptions(scale="none")
    assert read_ppo_loss({"value_clip": None}) == PPOLossOptions(value_clip=None)
    assert read_ppo_kl(None) == PPOKlOptions()
    assert read_ppo_kl({"target": 4.0, "gain": 0.3}).controller.after(1.0, kl=400.0) == pytest.approx(1.06)
    assert read_drawn(None).temperature == 1.0


@pytest.mark.parametrize(
    ("read", "values", "told"),
    [
        (read_loss, {"surrogate": "clp"}, "task.loss.surrogate='clp': must be one of clip, cispo, sapo, vespo"),
        (read_loss, {"normalisation": "grop"}, "did you mean grpo?"),
        (read_loss, {"clip_hgh": 0.2}, "task.loss.clip_hgh is no key of it; did you mean clip_high?"),
        (read_loss, {"max_length": 3}, "task.loss.max_length is no key"),
        (read_loss, {"clip_low": 0}, "task.loss.clip_low=0: must be a number above 0"),
        (read_loss, {"clip_low": 1.5}, "must be a number above 0, and at most 1"),
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
        (read_ppo_kl, {"wieght": 1.0}, "task.kl.wieght is no key of it; did you mean weight?"),
        (read_ppo_kl, {"estimator": ["k1"]}, "task.kl.estimator=['k1']: must be one of k1, k2, k3"),
        (read_ppo_kl, {"estimator": "k1", "place": "loss"}, "its mean gradient is 0"),
        (read_ppo_kl, 0.1, "task.kl is 0.1; it must be a mapping of weight, estimator, place, target, gain"),
        (read_drawn, {"temperature": 0}, "task.generation.temperature=0: answers to learn from are drawn"),
    ],
)
def test_a_wrong_option_is_told_with_its_key(read: Any, values: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(values)

    assert len(error.value.problems) == 1 and told in error.value.problems[0]


def test_k1_is_right_as_a_part_of_the_reward() -> None:
    assert read_kl({"weight": 0.1, "estimator": "k1", "place": "reward"}).place == "reward"


def test_everything_wrong_is_told_at_once() -> None:
    loss = {"clip_low": 1.0, "clip_high": 0, "value_clip": 0, "entropy_weight": -1, "clip": 1}
    kl = {"weight": "much", "place": "both", "estimator": "k4", "target": 0, "gain": 5}
    for read, values in ((read_ppo_loss, loss), (read_ppo_kl, kl)):
        with pytest.raises(ConfigError) as error:
            read(values)
        assert len(error.value.problems) == 5
