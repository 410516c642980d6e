"""Computes rewards of answers, each component by itself, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.rewards.models import ModelScorer
from tasks.rewards.reading import Reward, find_column_problems, find_model_problems, read_reward_mapping
from tasks.text.prompts import columns_of, repeat, texts_of
from tasks.text.sequences import Exchange, continuation
from tasks.values import SINGLE
from trainer import SCORE, Batch, ModelHandle, TaskModule, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to be scored, B of them.

    Args:
        prompts: What was asked, as text.
        completions: What was answered, without special tokens.
        exchanges: Both as token ids.
        raw_prompts: As the rows have them: text, or messages.
        columns: The other columns of their rows.
    """

    prompts: list[str]
    completions: list[str]
    exchanges: list[Exchange]
    raw_prompts: list[Any]
    columns: Mapping[str, list[Any]]

    @classmethod
    def of(
        cls, batch: Batch, exchanges: list[Exchange], *, samples: int, tokenizer: PreTrainedTokenizerBase
    ) -> Answers:
        """Returns the answers to a batch of prompts, so many of each, side by side."""
        return cls(
            prompts=repeat(texts_of(batch), samples),
            completions=[continuation(tokenizer, one.prompt, one.answer) for one in exchanges],
            exchanges=exchanges,
            raw_prompts=repeat(batch["columns"]["prompt"], samples),
            columns={name: repeat(values, samples) for name, values in columns_of(batch).items()},
        )

    def __len__(self) -> int:
        return len(self.completions)


class Rewards:
    """The components of a reward: which models they need, their values, their weighted sum.

    Args:
        rewards: By name.
    """

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self.rewards = dict(rewards)
        self.scorers: dict[str, ModelScorer] = {}  # by the name of the reward that a model gives

    @property
    def names(self) -> list[str]:
        return list(self.rewards)

    @property
    def model_names(self) -> list[str]:
        """The models that give rewards, each once."""
        return list(dict.fromkeys(one.model for one in self.rewards.values() if one.model is not None))

    @property
    def readers(self) -> list[ModelHandle]:
        """The models that read the answers' own tokens; after `setup`."""
        return [one.model for one in self.scorers.values() if one.is_same]

    @property
    def reads(self) -> dict[str, str]:
        """What the models that give rewards must give; see `TaskModule.reads`."""
        return dict.fromkeys(self.model_names, SCORE)

    def check_models(self, trainable: Mapping[str, bool]) -> list[str]:
        """Returns what is wrong with the models that give rewards; arguments as in `TaskModule.check_models`."""
        return find_model_problems(self.rewards, trainable)

    def check_columns(self, columns: Collection[str], *, data: str) -> list[str]:
        """Returns which reward needs a column that the rows of `data` have not."""
        return find_column_problems(self.rewards, columns, data=data)

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        """Returns which model that gives rewards has no tokenizer; arguments as in `TaskModule.check_tokenizers`."""
        return [
            f"models.{name} gives a reward, but it brings no tokenizer to read the answers by; choose a build with one"
            for name in self.model_names
            if tokenizers.get(name) is None
        ]

    def setup(self, task: TaskModule, *, writer: str) -> None:
        """Prepares the models that give rewards, once all are built.

        Args:
            writer: Name of the model that writes the answers.
        """
        source = task.trainer.tokenizers[writer]
        assert source is not None
        ends = end_tokens(task.models[writer].module, source)
        for name, reward in self.rewards.items():
            if reward.model is not None:
                target = task.trainer.tokenizers[reward.model]
                assert target is not None
                self.scorers[name] = ModelScorer(
                    task.models[reward.model], source=source, target=target, ends=ends, device=task.trainer.device
                )

    def score(self, answers: Answers, *, device: torch.device) -> Tensor:
        """Returns each component, (B, R) float32, NaN where one does not apply; every rank must call it."""
        columns = [
            _checked_scores(name, self.scorers[name](answers), model=reward.model)
            if reward.function is None
            else torch.tensor(_call(reward, answers), dtype=torch.float32, device=device)
            for name, reward in self.rewards.items()
        ]
        return torch.stack(columns, dim=1)

    def total(self, values: Tensor) -> Tensor:
        """Returns the weighted sum of the components that apply, (B,); NaN where none does.

        Args:
            values: (B, R); one of weight 0 is only watched.
        """
        weights = values.new_tensor([reward.weight for reward in self.rewards.values()])
        is_there = ~values.isnan() & (weights != 0)
        return (values.nan_to_num() * weights).sum(-1).masked_fill(~is_there.any(-1), math.nan)


def read_rewards(values: Any, *, key: str = "task.rewards") -> Rewards:
    """Returns the rewards of a mapping, or raises one ConfigError with everything that is wrong in it."""
    return Rewards(read_reward_mapping(values, key=key))


def means(values: Tensor, names: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the sum and the number of each component's values that exist, by name.

    Args:
        values: (B, R).
    """
    sums, counts = values.nan_to_num().sum(0), (~values.isnan()).sum(0)
    return {name: (sums[index], counts[index]) for index, name in enumerate(names)}


def _call(reward: Reward, answers: Answers) -> list[float]:
    assert reward.function is not None
    given: dict[str, Any] = {
        "prompts": answers.prompts,
        "completions": answers.completions,
        "completion_ids": [exchange.answer for exchange in answers.exchanges],
    }
    columns = {name: values for name, values in answers.columns.items() if name not in given}
    offered = {**given, **columns}
    # Copies: a function that changes what it is given must not change what the next one gets.
    offered = {name: list(values) for name, values in offered.items() if reward.takes is None or name in reward.takes}
    try:
        found = reward.function(**{**offered, **reward.arguments})
    except Exception as error:
        error.add_note(f"raised by the function of task.rewards.{reward.name}, given {', '.join(offered)}")
        raise
    return _checked(reward.name, found, answers)


def _checked(name: str, found: Any, answers: Answers) -> list[float]:
    """Returns the rewards as numbers, NaN for None, or raises ValueError for what is none."""
    if isinstance(found, Tensor):
        found = found.tolist()
    if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
        try:
            found = list(found) if not isinstance(found, str | Mapping) else None
        except TypeError:
            found = None
    if found is None or len(found) != len(answers):
        kind = "no list" if found is None else f"{len(found)} values"
        raise ValueError(
            f"the function of task.rewards.{name} returned {kind} for {len(answers)} answers; it must return a list "
            "with a number for each, None where the reward does not apply"
        )
    return [_number(name, value, answers, index) for index, value in enumerate(found)]


def _checked_scores(name: str, scores: Tensor, *, model: str | None) -> Tensor:
    """Returns the scores of a model, or raises ValueError where one is NaN, which would be no reward, or infinite."""
    bad = ~scores.isfinite()
    if bad.any():
        raise ValueError(
            f"models.{model}, which gives task.rewards.{name}, scored {int(bad.sum())} of {len(scores)} answers with "
            "NaN or inf; its weights are broken, or its numbers too large for its type: set "
            f"models.{model}.dtype=float32, or give another model"
        )
    return scores


def _number(name: str, value: Any, answers: Answers, index: int) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= SINGLE:  # beyond it a float32 has only inf
        raise ValueError(
            f"the function of task.rewards.{name} returned {value!r} for the answer {answers.completions[index]!r} to "
            f"{answers.prompts[index]!r}; it must be a finite number, or None where the reward does not apply"
        )
    return number
