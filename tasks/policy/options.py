"""The options of a policy gradient: `task.loss`, `task.kl` and `task.advantages`, with all that is wrong at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tasks.losses.policy import (
    BASELINES,
    KL_ESTIMATES,
    NORMALISATIONS,
    RATIOS,
    SCALES,
    SURROGATES,
    PolicyLoss,
)
from tasks.values import is_number
from trainer import ConfigError, did_you_mean

PLACES = ("loss", "reward")


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
class AdvantageOptions:
    """How the rewards of one prompt's answers become advantages; see `group_advantages`."""

    baseline: str = "mean"
    scale: str = "group"


def read_loss(values: Any, *, max_length: int, key: str = "task.loss") -> PolicyLoss:
    """Returns the loss of a mapping, or raises ConfigError with all that is wrong with it.

    Args:
        max_length: Tokens of the longest answer.
    """
    own = {field.name for field in fields(PolicyLoss)} - {"max_length"}
    given, problems = _known(values, own, key)
    for name, choices in (("surrogate", SURROGATES), ("ratio", RATIOS), ("normalisation", NORMALISATIONS)):
        problems += _find_choice_problem(given, name, choices, key)
    for name in ("clip_low", "clip_high", "sapo_positive", "sapo_negative"):
        if name in given and not (is_number(given[name]) and given[name] > 0):
            problems.append(f"{key}.{name}={given[name]!r}: must be a number above 0")
    if is_number(given.get("clip_low")) and given["clip_low"] > 1:
        problems.append(f"{key}.clip_low={given['clip_low']}: must be at most 1, as no ratio is below 0")
    limit, high = given.get("max_ratio"), given.get("clip_high", PolicyLoss.clip_high)
    if limit is not None and not (is_number(limit) and is_number(high) and limit > 1 + high):
        problems.append(f"{key}.max_ratio={limit!r}: must be a number above 1 + clip_high, or null")
    if given.get("surrogate", "clip") == "vespo" and given.get("ratio", "token") != "token":
        problems.append(f"{key}.ratio={given['ratio']}: vespo has a ratio of its own; drop it")
    if problems:
        raise ConfigError(*problems)
    return PolicyLoss(**given, max_length=max_length)


def read_kl(values: Any, *, key: str = "task.kl") -> KlOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    given, problems = _known(values, {field.name for field in fields(KlOptions)}, key)
    problems += _find_choice_problem(given, "estimator", tuple(KL_ESTIMATES), key)
    problems += _find_choice_problem(given, "place", PLACES, key)
    weight = given.get("weight", 0.0)
    if not (is_number(weight) and weight >= 0):
        problems.append(f"{key}.weight={weight!r}: must be a number of at least 0")
    if not problems and weight > 0 and given.get("estimator") == "k1" and given.get("place", "loss") == "loss":
        problems.append(
            f"{key}.estimator=k1: as a term of the loss its mean gradient is 0, and keeps the policy nowhere; take "
            f"k2 or k3, or {key}.place=reward"
        )
    if problems:
        raise ConfigError(*problems)
    return KlOptions(**given)


def read_advantages(values: Any, *, key: str = "task.advantages") -> AdvantageOptions:
    """Returns the options of a mapping, or raises ConfigError with all that is wrong with it."""
    given, problems = _known(values, {field.name for field in fields(AdvantageOptions)}, key)
    problems += _find_choice_problem(given, "baseline", BASELINES, key)
    problems += _find_choice_problem(given, "scale", SCALES, key)
    if problems:
        raise ConfigError(*problems)
    return AdvantageOptions(**given)


def _known(values: Any, names: set[str], key: str) -> tuple[dict[str, Any], list[str]]:
    if values is None:
        return {}, []
    if not isinstance(values, Mapping):
        return {}, [f"{key} is {values!r}; it must be a mapping of {', '.join(sorted(names))}"]
    problems = [
        f"{key}.{name} is no key of it{did_you_mean(str(name), names) or ', only ' + ', '.join(sorted(names))}"
        for name in values
        if name not in names
    ]
    return {name: value for name, value in values.items() if name in names}, problems


def _find_choice_problem(given: Mapping[str, Any], name: str, choices: tuple[str, ...], key: str) -> list[str]:
    if name not in given or given[name] in choices:
        return []
    return [
        f"{key}.{name}={given[name]!r}: must be one of {', '.join(choices)}{did_you_mean(str(given[name]), choices)}"
    ]
