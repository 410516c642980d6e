"""Computes rewards of answers, each component by itself, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.rewards.answers import FAILURES, Answers, words_of
from tasks.rewards.models import ModelScorer
from tasks.rewards.reading import Reward, find_column_problems, find_model_problems, read_reward_mapping
from tasks.values import SINGLE
from trainer import SCORE, Batch, ModelHandle, TaskModule, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardError(RuntimeError):
    """A reward function has failed, or what gives a reward gave no number."""


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
    def weighted_names(self) -> list[str]:
        """Those that are not only watched."""
        return [name for name, reward in self.rewards.items() if reward.weight]

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

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        """Returns which reward needs a column that the rows have not; arguments as in `TaskModule.check_batch`."""
        return find_column_problems(self.rewards, list(batch["columns"]), data=key)

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None], *, writer: str) -> list[str]:
        """Returns who has no tokenizer: the model that writes the answers, or one that gives a reward.

        Args:
            tokenizers: As in `TaskModule.check_tokenizers`.
        """
        if tokenizers.get(writer) is None:
            return ["the task reads text, but no model brings a tokenizer; give data.tokenizer=<folder>"]
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

    def total(self, values: Tensor, answers: Answers) -> Tensor:
        """Returns the weighted sum of the components that apply, (B,) float32; NaN where none does.

        Raises RewardError where a float32 cannot hold it.

        Args:
            values: (B, R); one of weight 0 is only watched.
        """
        found = values.double()
        weights = found.new_tensor([reward.weight for reward in self.rewards.values()])
        is_there = ~values.isnan() & (weights != 0)
        parts = found.nan_to_num() * weights
        sums = parts.sum(-1)
        for index in (sums.abs() > SINGLE).nonzero().flatten().tolist()[:1]:
            largest = int(parts[index].abs().argmax())
            name, reward = list(self.rewards.items())[largest]
            raise RewardError(
                f"task.rewards.{name} gave {values[index, largest].item():.4g}, and task.rewards.{name}.weight is "
                f"{reward.weight:.4g}: the weighted sum is {sums[index].item():.4g} for {answers.show(index)}, and a "
                f"float32 holds at most {SINGLE:.4g}; make the weight or the reward smaller"
            )
        return sums.float().masked_fill(~is_there.any(-1), math.nan)


def read_rewards(values: Any, *, key: str = "task.rewards") -> Rewards:
    """Returns the rewards of a mapping, or raises one ConfigError with everything that is wrong in it."""
    return Rewards(read_reward_mapping(values, key=key))


def means(values: Tensor, names: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the sum, in float64, and the number of each component's values that exist, by name.

    Args:
        values: (B, R).
    """
    sums, counts = values.double().nan_to_num().sum(0), (~values.isnan()).sum(0)
    return {name: (sums[index], counts[index]) for index, name in enumerate(names)}


def _call(reward: Reward, answers: Answers) -> list[float]:
    """Returns what a function finds, NaN for None, or raises RewardError."""
    try:
        found = _values(reward, answers, range(len(answers)))
    except FAILURES as error:
        raised = ": ".join(filter(None, (type(error).__name__, words_of(error, str))))
        index = _find_culprit(reward, answers, error)
        where = answers.show(index) if index is not None else f"{len(answers)} answers, for none of them by itself"
        raise RewardError(
            f"the function of task.rewards.{reward.name} raised {raised}, for {where}; mend it, or let it return None "
            "where the reward does not apply"
        ) from error
    if found is None or len(found) != len(answers):
        kind = "no list" if found is None else f"{len(found)} values"
        if found is not None and len(found) > len(answers):
            kind = f"more than {len(answers)} values"
        raise RewardError(
            f"the function of task.rewards.{reward.name} returned {kind} for {len(answers)} answers; it must return a "
            "list with a number for each, None where the reward does not apply"
        )
    return [_number(reward.name, value, answers, index) for index, value in enumerate(found)]


def _values(reward: Reward, answers: Answers, chosen: Sequence[int]) -> list[Any] | None:
    """Returns what a function returns for some of the answers, as a list; None where it is none.

    Of more values than answers only one more: a generator may never end.
    """
    assert reward.function is not None
    given: dict[str, Sequence[Any]] = {
        **answers.columns,
        "prompts": answers.prompts,
        "completions": answers.completions,
        "completion_ids": [exchange.answer for exchange in answers.exchanges],
    }
    # Copies: a function that changes what it is given must not change what the next one gets.
    offered = {
        name: [values[index] for index in chosen]
        for name, values in given.items()
        if reward.takes is None or name in reward.takes
    }
    found: Any = reward.function(**{**offered, **reward.arguments})
    if isinstance(found, Tensor):
        found = found.tolist()
    if not isinstance(found, Iterable) or isinstance(found, str | Mapping):
        return None
    return list(islice(found, len(chosen) + 1))


def _find_culprit(reward: Reward, answers: Answers, error: BaseException) -> int | None:
    """Returns an answer for which alone a function raises the same kind of error, None where it needs several."""

    def raises(chosen: Sequence[int]) -> bool:
        try:
            _values(reward, answers, chosen)
        except FAILURES as again:
            return type(again) is type(error)
        return False

    left: Sequence[int] = range(len(answers))
    while len(left) > 1:  # by halves: a function may be slow, or cost something
        half = left[: len(left) // 2]
        left = half if raises(half) else left[len(half) :]
    return left[0] if left and raises(left) else None


def _checked_scores(name: str, scores: Tensor, *, model: str | None) -> Tensor:
    """Returns the scores of a model, or raises RewardError where one is NaN, which would be no reward, or infinite."""
    bad = ~scores.isfinite()
    if bad.any():
        raise RewardError(
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
    except FAILURES:  # such as of a tensor of several numbers
        number = math.nan
    if not abs(number) <= SINGLE:  # beyond it a float32 has only inf
        raise RewardError(
            f"the function of task.rewards.{name} returned {words_of(value)} for {answers.show(index)}; "
            "it must be a finite number, or None where the reward does not apply"
        )
    return number
