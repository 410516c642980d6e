"""Whole steps of DPO: this trainer and TRL's DPOTrainer, each with a live reference and with one recorded before.

As a module it is the process that measures one of them: python -m tests.benchmarks.post_training.dpo ours 8 4 0
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from tests.benchmarks.distill.contenders import VOCABULARY
from tests.benchmarks.distill.measure import check_same_work, interleave, num_cores
from tests.benchmarks.post_training.measure import LR, policy, table_of, tokenizer
from tests.benchmarks.stopwatch import MAX_NORM, Stopwatch, StopwatchCallback, trl_settings, watch_trl
from trainer import IGNORED

BETA = 0.1
PROMPT, CHOSEN, REJECTED = 96, 64, 48  # tokens
PAIRS = (("ours", "TRL DPOTrainer"), ("ours, recorded", "TRL, precomputed"))


def ids(length: int, *, seed: int) -> list[int]:
    found: list[int] = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def the_pair(is_quick: bool) -> tuple[list[int], list[int], list[int]]:
    """Returns prompt and both answers of the one pair that every example is: the order of the data changes nothing."""
    scale = 8 if is_quick else 1
    return ids(PROMPT // scale, seed=0), ids(CHOSEN // scale, seed=1), ids(REJECTED // scale, seed=2)


def ours(num_steps: int, batch_size: int, is_quick: bool, *, reference: str = "reference") -> None:
    """This trainer and its task, as they are used from Python."""
    from tasks.dpo import DPOTask
    from trainer import ModelSpec, MultiModelTrainer, TrainingData
    from trainer.data.preferences import PreferenceCollator

    stopwatch = Stopwatch()
    build = functools.partial(policy, is_quick=is_quick)
    optimizer = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.0)
    models = {
        "policy": ModelSpec(build=build, dtype=torch.float32, optimizer=optimizer, max_grad_norm=MAX_NORM),
        "reference": ModelSpec(build=build, dtype=torch.float32, trainable=False),
    }
    plugins: dict[str, Any] = {"policy": {"zero_optimization": {"stage": 0}}, "reference": {"replicate": True}}
    task = DPOTask(beta=BETA, reference=reference)
    names = task.models_for("fit", list(models))
    trainer = MultiModelTrainer(
        {name: plugins[name] for name in names},
        max_steps=num_steps,
        callbacks={"stopwatch": StopwatchCallback(stopwatch)},
    )
    prompt, chosen, rejected = the_pair(is_quick)
    item: dict[str, Tensor] = {}
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        item[f"{side}_input_ids"] = torch.tensor(prompt + answer)
        item[f"{side}_labels"] = torch.tensor([IGNORED] * len(prompt) + answer)
    rows: Any = [item] * (num_steps * batch_size)
    data = TrainingData(train=rows, batch_size=batch_size, collate=PreferenceCollator(0))
    trainer.fit(task, models={name: models[name] for name in names}, data=data)
    stopwatch.finish(loss=loss_of(trainer.models["policy"].module, is_quick))


def trl(num_steps: int, batch_size: int, is_quick: bool, *, precomputed: bool = False) -> None:
    """TRL's DPOTrainer on the same tokens, which it need not make of text."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class GivenTokens(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    stopwatch = Stopwatch()
    prompt, chosen, rejected = the_pair(is_quick)
    count = num_steps * batch_size
    rows = {"prompt_ids": [prompt] * count, "chosen_ids": [chosen] * count, "rejected_ids": [rejected] * count}
    config = DPOConfig(
        beta=BETA, max_length=None, precompute_ref_log_probs=precomputed, **trl_settings(num_steps, batch_size, lr=LR)
    )
    trainer = GivenTokens(
        model=policy(is_quick=is_quick),
        ref_model=None if precomputed else policy(is_quick=is_quick),
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        callbacks=[watch_trl(stopwatch)],
    )
    trainer.train()
    stopwatch.finish(loss=loss_of(trainer.accelerator.unwrap_model(trainer.model), is_quick))


@torch.no_grad()
def loss_of(module: nn.Module, is_quick: bool) -> float:
    """Returns the loss of the pair after training, from logits, by torch's own functions."""
    prompt, *answers = the_pair(is_quick)
    start = policy(is_quick=is_quick).eval()

    def log_prob(model: nn.Module, answer: list[int]) -> Tensor:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return -F.cross_entropy(logits, torch.tensor(answer), reduction="sum")

    won, lost = (log_prob(module.eval(), answer) - log_prob(start, answer) for answer in answers)
    return float(-F.logsigmoid(BETA * (won - lost)))


CONTENDERS: dict[str, Callable[[int, int, bool], None]] = {
    "ours": ours,
    "TRL DPOTrainer": trl,
    "ours, recorded": functools.partial(ours, reference="cached"),
    "TRL, precomputed": functools.partial(trl, precomputed=True),
}


def compare(*, num_steps: int, repeats: int, is_quick: bool) -> Table:
    """Returns the medians of all contenders, and what ours takes of TRL's."""
    batch_size = 1 if is_quick else 4
    arguments = [str(number) for number in (num_steps, batch_size, int(is_quick))]
    commands = {name: ["tests.benchmarks.post_training.dpo", name, *arguments] for name in CONTENDERS}
    found = interleave(commands, repeats=repeats, num_threads=num_cores())
    check_same_work(found, "loss", tolerance=0.01)
    pair = "/".join(str(len(part)) for part in the_pair(is_quick))
    title = f"{batch_size} pairs of {pair} tokens (prompt/chosen/rejected), vocabulary {VOCABULARY}"
    return table_of(found, PAIRS, title=title, results=["loss"])


if __name__ == "__main__":
    contender, *sizes = sys.argv[1:]
    num_steps, batch_size, is_quick = map(int, sizes)
    CONTENDERS[contender](num_steps, batch_size, bool(is_quick))
