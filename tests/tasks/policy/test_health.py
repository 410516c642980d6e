"""What is warned of while a policy is trained: once each, with the number, against the start of the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tasks.policy.health import Health, HealthOptions, read_health, warn
from trainer import ConfigError

CALM = {
    "kl": 0.1,
    "entropy": 2.0,
    "clipped": 0.05,
    "answer_tokens": 50.0,
    "alike": 0.1,
    "reward": 0.5,
    "reward/right": 0.4,
    "reward/short": 0.6,
}


def metrics(**changed: float) -> dict[str, float]:
    return {f"train/actor/{name}": value for name, value in {**CALM, **changed}.items()} | {"train/loss": 1.0}


def watch(health: Health, steps: int, *, first: int = 1, **changed: float) -> list[str]:
    return [message for step in range(first, first + steps) for message in health.watch(metrics(**changed), step=step)]


def new() -> Health:
    return Health(HealthOptions(), prefix="train/actor/")


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("max_kl", {"kl": 1.5}, "1.5 nats a token from the reference; raise task.kl.weight"),
        ("min_entropy", {"entropy": 0.1}, "the entropy fell from 2 to 0.1"),
        ("max_entropy", {"entropy": 7.0}, "the entropy rose from 2 to 7"),
        ("max_clipped", {"clipped": 0.6}, "the gradient of 60% of the tokens"),
        ("min_length", {"answer_tokens": 5.0}, "answers fell from 50 to 5 tokens"),
        ("max_length", {"answer_tokens": 200.0}, "answers rose from 50 to 200 tokens"),
        ("max_alike", {"alike": 1.0}, "the same reward at 100% of the prompts"),
        ("max_fall", {"reward": 0.8, "reward/right": 0.1}, "its component right fell from 0.4 to 0.1"),
    ],
)
def test_each_number_that_runs_away_is_told_once(name: str, changed: dict[str, float], told: str) -> None:
    health = Health(HealthOptions(steps=1), prefix="train/actor/")

    assert watch(health, 10) == []
    (message,) = watch(health, 20, first=11, **changed)

    assert message.startswith("step 11: ") and told in message and f"(task.health.{name}=" in message


def test_a_single_step_is_no_trend() -> None:
    health = new()
    watch(health, 10)

    assert watch(health, 1, first=11, entropy=0.01, answer_tokens=400.0, clipped=0.9) == []


def test_a_component_that_falls_with_the_reward_is_no_news() -> None:
    health = new()
    watch(health, 10)

    assert watch(health, 10, first=11, reward=0.3, **{"reward/right": 0.1}) == []


def test_what_is_null_or_missing_is_not_watched() -> None:
    health = Health(HealthOptions(max_kl=None, min_entropy=None), prefix="train/actor/")
    watch(health, 10)

    assert watch(health, 10, first=11, kl=9.0, entropy=0.01) == []
    assert Health(HealthOptions(), prefix="train/other/").watch(metrics(kl=9.0), step=1) == []


def test_a_run_that_goes_on_remembers_its_start_and_what_was_told() -> None:
    health = new()
    watch(health, 10)
    first = watch(health, 10, first=11, kl=2.0)
    other = new()
    other.load_state_dict(health.state_dict())

    assert len(first) == 1
    assert watch(other, 10, first=21, kl=2.0) == []
    assert "from 2 to 0.1" in watch(other, 10, first=31, kl=2.0, entropy=0.1)[0]


def test_the_main_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn(["step 3: this"], is_main=True)
        warn(["step 3: that"], is_main=False)

    assert caplog.messages == ["step 3: this"]


def test_options_are_read_and_all_problems_told() -> None:
    assert read_health(None) is None
    assert read_health({"max_kl": None, "steps": 3}) == HealthOptions(max_kl=None, steps=3)
    wrong: dict[str, Any] = {"steps": 0, "max_kl": "x", "max_clip": 1}
    with pytest.raises(ConfigError) as error:
        read_health(wrong)
    assert len(error.value.problems) == 3 and "did you mean max_clipped?" in str(error.value)
    with pytest.raises(ConfigError, match=r"task\.health\.max_alike is no key of it"):
        read_health({"max_alike": 0.5}, without=["max_alike"])
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_health([])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_clipped", "max_alike", "min_entropy", "min_length"])
@pytest.mark.parametrize("value", [30, 1.0, 0])
def test_a_share_that_would_warn_never_or_always_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"task\.health\.{name}={value}: must be between 0 and 1, a share, or null"):
        read_health({name: value})


@pytest.mark.parametrize("name", ["max_entropy", "max_length"])
def test_a_multiple_of_the_start_is_above_1(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"task\.health\.{name}=0\.5: must be a number above 1"):
        read_health({name: 0.5})
