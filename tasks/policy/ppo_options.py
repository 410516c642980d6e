"""What the configuration of PPO says of its losses, and of how the actor is kept near its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tasks.losses.advantages import KLController
from tasks.losses.policy import KL_ESTIMATES
from tasks.values import find_value_problems, is_above, is_at_least
from trainer import ConfigError, did_you_mean

PLACES = ("reward", "loss")
_AT_LEAST, _ABOVE = "a number of at least 0", "a number above 0"


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How far a step may go.

    Args:
        clip_low: A token's probability ratio counts from 1 less this on,
        clip_high: up to 1 and this.
        value_clip: How far a value may leave the old one, in the units of the scores; None: no limit.
        entropy_weight: Of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float | None = 0.2
    entropy_weight: float = 0.0

    def find_problems(self, key: str) -> list[str]:
        """Returns what is wrong with the values."""
        clip = self.value_clip
        return find_value_problems(
            key,
            clip_low=(self.clip_low, is_above(self.clip_low, 0) and self.clip_low < 1, "a number between 0 and 1"),
            clip_high=(self.clip_high, is_above(self.clip_high, 0), _ABOVE),
            value_clip=(clip, clip is None or is_above(clip, 0), f"{_ABOVE}, or null for no limit"),
            entropy_weight=(self.entropy_weight, is_at_least(self.entropy_weight, 0), _AT_LEAST),
        )


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """How the actor is kept near its reference.

    Args:
        weight: The coefficient of the first rollout.
        place: "reward": a part of each token's reward; "loss": a term of the actor's loss.
        estimator: Of that term, from the log-probabilities of one token: k1, k2 or k3.
        target: The KL per answer, in nats, that the coefficient is adapted to; None: it stays.
        gain: How fast it adapts.
    """

    weight: float = 0.05
    place: str = "reward"
    estimator: str = "k3"
    target: float | None = None
    gain: float = 0.1

    @property
    def controller(self) -> KLController:
        """What adapts the coefficient."""
        return KLController(target=self.target, gain=self.gain)

    def find_problems(self, key: str) -> list[str]:
        """Returns what is wrong with the values."""
        # At a gain of 5 the coefficient could become 0 at once.
        return find_value_problems(
            key,
            weight=(self.weight, is_at_least(self.weight, 0), _AT_LEAST),
            place=(self.place, self.place in PLACES, " or ".join(PLACES)),
            estimator=(self.estimator, self.estimator in tuple(KL_ESTIMATES), f"one of {', '.join(KL_ESTIMATES)}"),
            target=(
                self.target,
                self.target is None or is_above(self.target, 0),
                f"{_ABOVE}, or null",
            ),
            gain=(self.gain, is_above(self.gain, 0) and self.gain < 5, "a number between 0 and 5"),
        )


Options = TypeVar("Options", LossOptions, KLOptions)


def read_options(kind: type[Options], values: Any, *, key: str) -> Options:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with them.

    Args:
        key: Where it stands, such as "task.kl".
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values!r}: must be a mapping, or left out")
    known = [field.name for field in fields(kind)]
    problems = [
        f"{key}.{name} is unknown, only {', '.join(known)}{did_you_mean(str(name), known)}"
        for name in values
        if name not in known
    ]
    found = kind(**{name: value for name, value in values.items() if name in known})
    problems += found.find_problems(key)
    if problems:
        raise ConfigError(*problems)
    return found
