"""Runs on real engines whose models write before each update, and the same text by hand."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.generation import GenerationOptions, LocalWriter, Written, greedy, row_seeds
from tasks.generation.draws import TokenDraws
from tests.tasks.task_runs import llama
from tests.tasks.tiny_tokenizers import CHARACTERS, make_tokenizer
from tests.trainer.test_trainer import reset_accelerate
from trainer import ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData, distributed
from trainer.handle import gathered_state_dict

STEPS = 2
END = 36  # a token that the models like: answers of several lengths
PROMPTS = [[5, 6, 7, 8], [9], [10, 11], [12, 13, 14], [20, 21, 22, 23, 24], [30]]
NEW = (5, 2, 5)  # at most so many tokens on each rank
OPTIONS = GenerationOptions(temperature=1.2, top_k=40, top_p=0.95)
PLUGINS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    # Some weights stay whole on every rank: by default those of up to 100,000 elements, here all.
    "zero3_persistent": {"zero_optimization": {"stage": 3}},
    "frozen": {"replicate": True},
    "frozen3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}
TRAINED = [name for name in PLUGINS if "frozen" not in name]


def tokenizer() -> Any:
    special = ("<pad>", *(f"<{index}>" for index in range(1, END)), "<end>")
    return make_tokenizer(special=special, characters=CHARACTERS[: 61 - len(special)])


def prompts_of(rank: int, world_size: int) -> list[int]:
    """Returns which prompts a rank has; the last of three has none."""
    return list(range(len(PROMPTS)))[rank :: min(world_size, 2)] if rank < 2 else []


class WritingTask(TaskModule):
    """Every model writes before each window, drawn and greedily; then the trained ones fit a text.

    Args:
        gather: As of `ModelHandle.generate`; None: nothing is written.
    """

    def __init__(self, gather: Any) -> None:
        self.gather = gather
        self.written: dict[tuple[str, int, str], Written] = {}
        self.asked = prompts_of(distributed.rank(), distributed.world_size())

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        step = self.trainer.global_step
        seeds = row_seeds(0, step, self.asked)
        for name in self.models if self.gather is not None else ():
            writer = LocalWriter(self.models[name], tokenizer(), device=self.trainer.device, gather=self.gather)
            asked = [PROMPTS[index] for index in self.asked]
            own = dataclasses.replace(OPTIONS, max_new_tokens=NEW[self.trainer.rank])
            for kind, options in (("drawn", own), ("greedy", greedy(own))):
                self.written[name, step, kind] = writer.write(asked, seeds=seeds, options=options)
        return batch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        losses = {}
        for name in TRAINED:
            output = self.models[name](input_ids=batch["input_ids"], labels=batch["input_ids"])
            losses[name] = output.loss
        return StepOutput(losses=losses)


def run_writers(folder: Path) -> dict[str, Any]:
    """Returns what was written, the trained weights (on rank 0) and the engines, by how weights are gathered."""
    return {str(gather): run_one(gather) for gather in (None, True, False)}


def run_one(gather: Any) -> dict[str, Any]:
    reset_accelerate()
    trainer = MultiModelTrainer(PLUGINS, max_steps=STEPS)
    adam = functools.partial(torch.optim.AdamW, lr=5e-2)
    models = {
        name: ModelSpec(
            build=functools.partial(llama, "large"),
            dtype=torch.float32,
            trainable=name in TRAINED,
            optimizer=adam if name in TRAINED else None,
        )
        for name in PLUGINS
    }
    generator = torch.Generator().manual_seed(0)
    rows: Any = [{"input_ids": torch.randint(3, 60, (8,), generator=generator)} for _ in range(6 * STEPS)]
    task = WritingTask(gather)
    data = TrainingData(train=rows, batch_size=6 // trainer.world_size)
    start = time.monotonic()
    trainer.fit(task, models=models, data=data)
    seconds = time.monotonic() - start
    weights = {name: gathered_state_dict(trainer.models[name].module) for name in TRAINED}
    return {
        "written": task.written,
        "asked": task.asked,
        "weights": weights,
        "stages": {name: model.stage for name, model in trainer.models.items()},
        "is_whole": [
            name
            for name, model in trainer.models.items()
            if model.stage == 3 and any(p.numel() for p in model.module.parameters() if not p.ds_persist)
        ],
        "seconds": seconds,
    }


# The same by hand


@torch.no_grad()
def expected_answer(model: Any, index: int, *, step: int, kind: str, limit: int) -> list[int]:
    """One prompt alone, without padding or cache: the largest of the scores, or of what a draw makes of them."""
    answer: list[int] = []
    draws = TokenDraws(OPTIONS, row_seeds(0, step, [index]), prompt_width=len(PROMPTS[index]))
    while len(answer) < limit and not (answer and answer[-1] in (END, 2)):
        ids = torch.tensor([PROMPTS[index] + answer])
        scores = model(input_ids=ids, use_cache=False).logits[:, -1]
        answer.append(int((draws(ids, scores) if kind == "drawn" else scores).argmax()))
    return answer
