"""Whole steps of GRPO, generation included: this trainer and TRL's GRPOTrainer, as many tokens each.

As a module it is the process that measures one of them: python -m tests.benchmarks.post_training.grpo ours 8 0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from tests.benchmarks.distill.contenders import VOCABULARY
from tests.benchmarks.distill.measure import check_same_work, interleave, num_cores
from tests.benchmarks.post_training.measure import LR, policy, table_of, tokenizer
from tests.benchmarks.stopwatch import MAX_NORM, Stopwatch, StopwatchCallback, trl_settings, watch_trl

PAIRS = (("ours", "TRL GRPOTrainer"),)
CLIP = 0.2


class Sizes:
    """Prompts of a step, tokens of a prompt, answers to each, tokens of an answer."""

    def __init__(self, *, is_quick: bool) -> None:
        self.prompts, self.prompt, self.answers, self.answer = (2, 8, 2, 8) if is_quick else (4, 32, 8, 64)


def prompts(sizes: Sizes, *, num_steps: int) -> list[str]:
    ids = torch.randint(
        3, VOCABULARY, (num_steps * sizes.prompts, sizes.prompt), generator=torch.Generator().manual_seed(0)
    )
    return [" ".join(f"w{number}" for number in row) for row in ids.tolist()]


class Counted:
    """A reward that any answer may have, and the number of tokens that were written."""

    __name__ = "even"

    def __init__(self) -> None:
        self.tokens = self.calls = 0

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        self.calls += 1
        self.tokens += sum(map(len, completion_ids))
        return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]


def ours(num_steps: int, is_quick: bool) -> None:
    """This trainer and its task, as they are used from Python; no token ends an answer."""
    from tasks.grpo import GRPOTask
    from tasks.rewards import Reward, Rewards
    from trainer import ModelSpec, MultiModelTrainer, TrainingData
    from trainer.data.prompts import PromptRows

    sizes, stopwatch, reward = Sizes(is_quick=is_quick), Stopwatch(), Counted()
    own = tokenizer()
    own.eos_token = None
    task = GRPOTask(
        num_completions=sizes.answers,
        generation={"max_new_tokens": sizes.answer, "temperature": 1.0},
        rewards={"brevity": {}},
        loss={"normalisation": "token", "clip_low": CLIP, "clip_high": CLIP},
        samples_every=10**6,
    )
    task.rewards = Rewards({"even": Reward(name="even", function=reward)})
    rows = [{"prompt": text} for text in prompts(sizes, num_steps=num_steps)]
    data = TrainingData(
        train=PromptRows().build(rows, own, block_size=sizes.prompt),
        batch_size=sizes.prompts,
        collate=PromptRows().collator(own),
        tokenizer=own,
    )
    trainer = MultiModelTrainer(
        {"actor": {"zero_optimization": {"stage": 0}}},
        max_steps=num_steps,
        callbacks={"stopwatch": StopwatchCallback(stopwatch)},
    )
    spec = ModelSpec(
        build=partial(policy, is_quick=is_quick),
        dtype=torch.float32,
        optimizer=partial(torch.optim.AdamW, lr=LR, weight_decay=0.0),
        max_grad_norm=MAX_NORM,
    )
    trainer.fit(task, models={"actor": spec}, data=data)
    stopwatch.finish(tokens=reward.tokens / reward.calls)


def trl(num_steps: int, is_quick: bool) -> None:
    """TRL's GRPOTrainer on the same prompts; its answers may not end before their length."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sizes, stopwatch, reward = Sizes(is_quick=is_quick), Stopwatch(), Counted()
    config = GRPOConfig(
        num_generations=sizes.answers,
        max_completion_length=sizes.answer,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=CLIP,
        beta=0.0,
        generation_kwargs={"min_new_tokens": sizes.answer},
        **trl_settings(num_steps, sizes.prompts * sizes.answers, lr=LR),
    )
    trainer = GRPOTrainer(
        model=policy(is_quick=is_quick),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts(sizes, num_steps=num_steps)}),
        processing_class=tokenizer(),
        callbacks=[watch_trl(stopwatch)],
    )
    trainer.train()
    stopwatch.finish(tokens=reward.tokens / reward.calls)


CONTENDERS: dict[str, Callable[[int, bool], None]] = {"ours": ours, "TRL GRPOTrainer": trl}


def compare(*, num_steps: int, repeats: int, is_quick: bool) -> Table:
    """Returns the medians of both, and what ours takes of TRL's."""
    sizes = Sizes(is_quick=is_quick)
    arguments = [str(number) for number in (num_steps, int(is_quick))]
    commands = {name: ["tests.benchmarks.post_training.grpo", name, *arguments] for name in CONTENDERS}
    found = interleave(commands, repeats=repeats, num_threads=num_cores())
    check_same_work(found, "tokens", tolerance=0)
    title = (
        f"{sizes.prompts} prompts of {sizes.prompt} tokens, {sizes.answers} answers of {sizes.answer} tokens to each, "
        f"vocabulary {VOCABULARY}"
    )
    return table_of(found, PAIRS, title=title, results=["tokens"])


if __name__ == "__main__":
    contender, *sizes_given = sys.argv[1:]
    steps, quick = map(int, sizes_given)
    CONTENDERS[contender](steps, bool(quick))
