"""The options of a policy gradient, GRPO's and PPO's, read with all that is wrong with them at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tasks.generation import GenerationOptions
from tasks.generation import read_options as read_generation
from tasks.losses.advantages import KLController
from tasks.losses.policy import BASELINES, KL_ESTIMATES, NORMALISATIONS, RATIOS, SCALES, SURROGATES, PolicyLoss
from tasks.values import find_value_problems, is_above, is_at_least, is_whole
from trainer import ConfigError, did_you_mean

PLACES = ("loss", "reward")
_AT_LEAST, _ABOVE = "a number of at least 0", "a number above 0"

Options = TypeVar("Options")


def read_options(
    kind: type[Options],
    values: Any,
    find_problems: Callable[[Options, str], list[str]],
    *,
    key: str,
    without: Collection[str] = (),
) -> Options:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it.

    Args:
        kind: A dataclass with a default for each field.
        values: None: the defaults.
        find_problems: Returns what is wrong with the values of such options under a key.
        key: Where they stand, such as "task.kl".
        without: Fields that cannot be set.
    """
    known = [field.name for field in fields(kind) if field.name not in without]  # type: ignore[arg-type]
    if not (values is None or isinstance(values, Mapping)):
        raise ConfigError(f"{key} is {values!r}; it must be a mapping of {', '.join(known)}")
    given = dict(values or {})
    problems = [
        f"{key}.{name} is no key of it{did_you_mean(str(name), known) or ', only ' + ', '.join(known)}"
        for name in given
        if name not in known
    ]
    found = kind(**{name: value for name, value in given.items() if name in known})
    problems += find_problems(found, key)
    if problems:
        raise ConfigError(*problems)
    return found


@dataclass(frozen=True, kw_only=True)
class KlOptions:
    """How the policy is kept near a reference.

    Args:
        weight: Of the divergence; 0: it is only watched, where there is a reference.
        estimator: "k1", "k2" or "k3"; see `tasks.losses.policy`.
        place: "loss": a term of the loss, by token (GRPO); "reward": the sum over an answer's tokens is taken from its
            reward, before its advantage (RLOO).
    """

    weight: float = 0.0
    estimator: str = "k3"
    place: str = "loss"


@dataclass(frozen=True, kw_only=True)
class PPOKlOptions(KlOptions):
    """How PPO keeps the actor near its reference; `estimator` is only that of the loss.

    Args:
        weight: That of the first rollout.
        place: "reward": log(actor / reference) is taken from each token's reward; "loss": a term of the actor's loss.
        target: The KL per answer, in nats, that the weight is adapted to; None: it stays.
        gain: How fast it adapts.
    """

    weight: float = 0.05
    place: str = "reward"
    target: float | None = None
    gain: float = 0.1

    @property
    def controller(self) -> KLController:
        """What adapts the weight."""
        return KLController(target=self.target, gain=self.gain)


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """How the rewards of one prompt's answers become advantages; see `group_advantages`."""

    baseline: str = "mean"
    scale: str = "group"


@dataclass(frozen=True, kw_only=True)
class PPOLossOptions:
    """How far a step of PPO may go.

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


def read_drawn(values: Any, *, key: str = "task.generation") -> GenerationOptions:
    """Returns how answers are drawn to learn from, or raises ConfigError with all that is wrong with it."""
    options = read_generation({} if values is None else values, key=key)
    if options.temperature == 0:
        raise ConfigError(f"{key}.temperature=0: answers to learn from are drawn, not all alike; give a number above 0")
    return options


def read_loss(values: Any, *, key: str = "task.loss") -> PolicyLoss:
    """Returns the loss of a mapping, or raises ConfigError with all that is wrong with it."""
    return read_options(PolicyLoss, values, _find_loss_problems, key=key, without=["max_length"])


def read_kl(values: Any, *, key: str = "task.kl") -> KlOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    return read_options(KlOptions, values, _find_kl_problems, key=key)


def read_advantages(values: Any, *, key: str = "task.advantages") -> AdvantageOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    return read_options(AdvantageOptions, values, _find_advantage_problems, key=key)


def read_ppo_loss(values: Any, *, key: str = "task.loss") -> PPOLossOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    return read_options(PPOLossOptions, values, _find_ppo_loss_problems, key=key)


def read_ppo_kl(values: Any, *, key: str = "task.kl") -> PPOKlOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    return read_options(PPOKlOptions, values, _find_ppo_kl_problems, key=key)


def _find_loss_problems(loss: PolicyLoss, key: str) -> list[str]:
    numbers = {name: getattr(loss, name) for name in ("clip_high", "sapo_positive", "sapo_negative")}
    limit, high = loss.max_ratio, loss.clip_high
    is_limit = limit is None or (is_above(high, 0) and is_above(limit, 1 + high))
    problems = find_value_problems(
        key,
        surrogate=_one_of(SURROGATES, loss.surrogate),
        ratio=_one_of(RATIOS, loss.ratio),
        normalisation=_one_of(NORMALISATIONS, loss.normalisation),
        # A ratio is never below 0.
        clip_low=(loss.clip_low, is_above(loss.clip_low, 0) and loss.clip_low <= 1, "a number above 0, and at most 1"),
        **{name: (value, is_above(value, 0), _ABOVE) for name, value in numbers.items()},
        max_ratio=(limit, is_limit, "a number above 1 + clip_high, or null"),
    )
    if loss.surrogate == "vespo" and loss.ratio != "token":
        problems.append(f"{key}.ratio={loss.ratio}: vespo has a ratio of its own; drop it")
    return problems


def _find_kl_problems(kl: KlOptions, key: str) -> list[str]:
    problems = find_value_problems(
        key,
        weight=(kl.weight, is_at_least(kl.weight, 0), _AT_LEAST),
        estimator=_one_of(KL_ESTIMATES, kl.estimator),
        place=_one_of(PLACES, kl.place),
    )
    if not problems and kl.weight > 0 and kl.estimator == "k1" and kl.place == "loss":
        problems.append(
            f"{key}.estimator=k1: as a term of the loss its mean gradient is 0, and keeps the policy nowhere; take "
            f"k2 or k3, or {key}.place=reward"
        )
    return problems


def _find_ppo_kl_problems(kl: PPOKlOptions, key: str) -> list[str]:
    target, gain = kl.target, kl.gain
    return _find_kl_problems(kl, key) + find_value_problems(
        key,
        target=(target, target is None or is_above(target, 0), f"{_ABOVE}, or null"),
        # At a gain of 5 the weight could become 0 at once.
        gain=(gain, is_above(gain, 0) and gain < 5, "a number between 0 and 5"),
    )


def _find_advantage_problems(options: AdvantageOptions, key: str) -> list[str]:
    return find_value_problems(key, baseline=_one_of(BASELINES, options.baseline), scale=_one_of(SCALES, options.scale))


def _find_ppo_loss_problems(loss: PPOLossOptions, key: str) -> list[str]:
    clip = loss.value_clip
    return find_value_problems(
        key,
        clip_low=(loss.clip_low, is_above(loss.clip_low, 0) and loss.clip_low < 1, "a number between 0 and 1"),
        clip_high=(loss.clip_high, is_above(loss.clip_high, 0), _ABOVE),
        value_clip=(clip, clip is None or is_above(clip, 0), f"{_ABOVE}, or null for no limit"),
        entropy_weight=(loss.entropy_weight, is_at_least(loss.entropy_weight, 0), _AT_LEAST),
    )


def whole(value: Any, *, least: int) -> tuple[Any, bool, str]:
    """Returns what `find_value_problems` asks of a count."""
    return value, is_whole(value) and value >= least, f"a whole number of at least {least}"


def _one_of(choices: Iterable[str], value: Any) -> tuple[Any, bool, str]:
    """Returns what `find_value_problems` asks of a choice."""
    known = tuple(choices)
    return value, value in known, f"one of {', '.join(known)}{did_you_mean(str(value), known)}"
