"""Watches a policy while it is trained: one warning each where a number runs away, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tasks.policy.options import read_options, whole
from tasks.values import find_value_problems, is_number
from trainer import ConfigError

if TYPE_CHECKING:
    from trainer import MultiModelTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """What is too much; null switches a warning off. "At the start" is the mean of the first `steps` global steps, and
    compared with it is the mean of the last ones.

    Args:
        steps: How many steps each mean is of.
        max_kl: Of the policy to the reference, nats a token.
        min_entropy: Share of the entropy at the start.
        max_entropy: Times the entropy at the start.
        max_clipped: Share of the tokens whose gradient the clip takes away.
        min_length: Share of the answers' length at the start.
        max_length: Times the answers' length at the start.
        max_alike: Share of the prompts all of whose answers have one reward, so that nothing is learnt of them.
        max_fall: How far a component of the reward may fall while the whole reward rises, as a share of its size at the
            start.
    """

    steps: int = 5
    max_kl: float | None = 1.0
    min_entropy: float | None = 0.2
    max_entropy: float | None = 3.0
    max_clipped: float | None = 0.3
    min_length: float | None = 0.2
    max_length: float | None = 3.0
    max_alike: float | None = 0.9
    max_fall: float | None = 0.3


# For `without`, of a task that knows nothing of its answers but their lengths.
BUT_LENGTHS = tuple(
    field.name for field in fields(HealthOptions) if field.name not in ("steps", "min_length", "max_length")
)


def read_health(
    values: Mapping[str, Any] | None, *, key: str = "task.health", without: Sequence[str] = ()
) -> HealthOptions | None:
    """Returns the options, None where nothing is watched; raises ConfigError with all that is wrong.

    Args:
        without: Names of what the task never measures.
    """
    if values is None:
        return None
    return read_options(HealthOptions, values, _find_problems, key=key, without=without)


def _find_problems(options: HealthOptions, key: str) -> list[str]:
    values = {name: getattr(options, name) for name in _WANTED}
    limits = {
        name: (value, value is None or (is_number(value) and _WANTED[name][0](value)), f"{_WANTED[name][1]}, or null")
        for name, value in values.items()
    }
    return find_value_problems(key, steps=whole(options.steps, least=1), **limits)


def _is_above(value: float) -> bool:
    return value > 0


def _is_share(value: float) -> bool:
    return 0 < value < 1


def _is_times(value: float) -> bool:
    return value > 1


# Others would warn always, or never: a share of 30, where 0.3 is meant.
_WANTED: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_kl": (_is_above, "a number above 0"),
    "max_fall": (_is_above, "a number above 0"),
    **dict.fromkeys(("min_entropy", "min_length", "max_clipped", "max_alike"), (_is_share, "between 0 and 1, a share")),
    **dict.fromkeys(("max_entropy", "max_length"), (_is_times, "a number above 1, so many times the start's")),
}


class Health:
    """Compares the numbers of each step with those of the run's start; what it has seen is in `state_dict`.

    Args:
        prefix: Before the names of the metrics, such as "train/actor/".
    """

    def __init__(self, options: HealthOptions, *, prefix: str) -> None:
        self.options, self.prefix = options, prefix
        self.start: dict[str, list[float]] = {}  # the first values of each metric
        self.recent: dict[str, list[float]] = {}  # the last ones
        self.told: list[str] = []

    def watch(self, metrics: Mapping[str, float], *, step: int) -> list[str]:
        """Returns what is to be warned of after a step, each once in a run.

        Args:
            metrics: Reduced over all ranks.
        """
        for name, value in metrics.items():
            if name.startswith(self.prefix):
                key, limit = name.removeprefix(self.prefix), self.options.steps
                if len(self.start.setdefault(key, [])) < limit:
                    self.start[key].append(float(value))
                self.recent[key] = [*self.recent.get(key, []), float(value)][-limit:]
        found = []
        for name, rule in _RULES.items():
            limit = getattr(self.options, name)
            message = rule(self, limit) if limit is not None and name not in self.told else None
            if message is not None:
                self.told.append(name)
                found.append(f"step {step}: {message} (task.health.{name}={limit:g}; null for no warning)")
        return found

    def now(self, key: str) -> float | None:
        """Returns a metric's mean over the last steps, None before there are so many."""
        values = self.recent.get(key, [])
        return sum(values) / len(values) if len(values) == self.options.steps else None

    def began(self, key: str) -> float | None:
        """Returns a metric's mean over the first steps, None before they are over."""
        values = self.start.get(key, [])
        return sum(values) / len(values) if len(values) == self.options.steps else None

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "recent": self.recent, "told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start = {key: list(values) for key, values in state["start"].items()}
        self.recent = {key: list(values) for key, values in state["recent"].items()}
        self.told = list(state["told"])


class Unrewarded:
    """Refuses a run whose first window has no answer with a reward, and warns once of a later one.

    Args:
        names: Of the rewards that count.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.is_told = list(names), False

    def check(self, count: float, *, trainer: MultiModelTrainer) -> None:
        """Raises ConfigError where nothing could be learnt from the first window; every rank must call it.

        Args:
            count: Answers of the window that have a reward, on all ranks.
        """
        if count:
            return
        rewards = " and ".join(f"task.rewards.{name}" for name in self.names)
        if trainer.global_step == 0:
            raise ConfigError(
                f"{rewards} returned None for every answer of the first window, so that nothing would be learnt; see "
                "whether prompts and columns are those that it is meant for, or add a reward that applies to all"
            )
        if not self.is_told:
            fact = f"{rewards} returned None for every answer of the window, and nothing is learnt of it"
            warn([f"step {trainer.global_step + 1}: {fact}; told once"], is_main=trainer.is_main)
        self.is_told = True


def warn(messages: list[str], *, is_main: bool) -> None:
    """Logs the warnings once, on one rank."""
    for message in messages if is_main else []:
        log.warning("%s", message)


def _kl(health: Health, limit: float) -> str | None:
    now = health.now("kl")
    if now is None or now <= limit:
        return None
    return (
        f"the policy is {now:.3g} nats a token from the reference; raise task.kl.weight, lower the actor's lr, or read "
        "the samples for answers that only please the reward"
    )


def _entropy(health: Health, limit: float) -> str | None:
    now, began = health.now("entropy"), health.began("entropy")
    if now is None or began is None or now >= limit * began:
        return None
    return (
        f"the entropy fell from {began:.3g} to {now:.3g} nats a token, and answers to one prompt become alike; raise "
        "task.loss.clip_high or task.generation.temperature, or lower the actor's lr"
    )


def _high_entropy(health: Health, limit: float) -> str | None:
    now, began = health.now("entropy"), health.began("entropy")
    if now is None or began is None or now <= limit * began:
        return None
    return (
        f"the entropy rose from {began:.3g} to {now:.3g} nats a token, and answers become random; lower the actor's "
        "lr, or raise task.kl.weight"
    )


def _clipped(health: Health, limit: float) -> str | None:
    now = health.now("clipped")
    if now is None or now <= limit:
        return None
    return (
        f"the clip takes away the gradient of {now:.0%} of the tokens, as the policy moves too far from the one that "
        "wrote them; lower the actor's lr, or train fewer times on each window (task.epochs)"
    )


def _short(health: Health, limit: float) -> str | None:
    now, began = health.now("answer_tokens"), health.began("answer_tokens")
    if now is None or began is None or now >= limit * began:
        return None
    return (
        f"answers fell from {began:.3g} to {now:.3g} tokens; see by the samples whether they still answer, or are "
        "rewarded for brevity alone"
    )


def _long(health: Health, limit: float) -> str | None:
    now, began = health.now("answer_tokens"), health.began("answer_tokens")
    if now is None or began is None or now <= limit * began:
        return None
    return (
        f"answers rose from {began:.3g} to {now:.3g} tokens; see by the samples whether they still come to an end, or "
        "are rewarded for length (task=grpo: task.loss.normalisation=dr_grpo)"
    )


def _alike(health: Health, limit: float) -> str | None:
    now = health.now("alike")
    if now is None or now <= limit:
        return None
    return (
        f"all answers have the same reward at {now:.0%} of the prompts, of which nothing is learnt; choose easier or "
        "harder prompts, a finer reward, or more completions (task.num_completions)"
    )


def _fall(health: Health, limit: float) -> str | None:
    """A component falls while the sum rises: what is learnt is to please the others."""
    now, began = health.now("reward"), health.began("reward")
    if now is None or began is None or now <= began:
        return None
    for key in health.start:
        after, before = health.now(key), health.began(key)
        if not key.startswith("reward/") or after is None or before is None or before == 0:
            continue
        if before - after > limit * abs(before):
            name = key.removeprefix("reward/")
            return (
                f"the reward rose from {began:.3g} to {now:.3g} while its component {name} fell from {before:.3g} to "
                f"{after:.3g}: the others are pleased at its expense; raise task.rewards.{name}.weight, or mend them"
            )
    return None


_RULES: dict[str, Callable[[Health, float], str | None]] = {
    "max_kl": _kl,
    "min_entropy": _entropy,
    "max_entropy": _high_entropy,
    "max_clipped": _clipped,
    "min_length": _short,
    "max_length": _long,
    "max_alike": _alike,
    "max_fall": _fall,
}
