"""Runs on real engines of the tasks in which a teacher writes text or reads its own tokens, and the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.distill_sequence import DistillSequenceTask
from tasks.distill_unaligned import DistillUnalignedTask
from tasks.generation import GenerationOptions, row_seeds
from tasks.generation.draws import TokenDraws
from tests.tasks.task_runs import (
    LR,
    PAD,
    VOCABULARY,
    fit,
    frozen,
    llama,
    shared_texts,
    shared_validation,
    trained,
    windows,
    zero,
)
from tests.tasks.tiny_tokenizers import CHARACTERS, make_tokenizer
from trainer import IGNORED, TrainingData
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.text import TextDataset

STEPS, BATCH, NEW = 2, 6, 6
END = 36  # a token that the teacher likes: answers of several lengths
ENDS = {END, 2}  # the tokenizer's end token, and that of the models' generation_config
DRAWN = GenerationOptions(max_new_tokens=NEW, temperature=1.5, top_p=0.9)
PLUGINS = {"student": zero(1), "teacher": zero(3)}


def tokenizer() -> Any:
    """As many tokens as the models have logits."""
    special = ("<pad>", *(f"<{index}>" for index in range(1, END)), "<end>")
    return make_tokenizer(special=special, characters=CHARACTERS[: VOCABULARY - len(special)])


def data(world_size: int) -> TrainingData:
    return TrainingData(
        train=TextDataset(shared_texts(), prompts=[]),
        validation=TextDataset(shared_validation(), prompts=[]),
        batch_size=BATCH // world_size,
        collate=PaddingCollator(PAD),
        tokenizer=tokenizer(),
    )


def run_text_tasks(folder: Path) -> dict[str, Any]:
    """Returns what each run found: the update of greedy text, and that others end."""
    from trainer import distributed

    found = {}
    for name, task in (
        ("greedy", DistillSequenceTask(max_new_tokens=NEW)),
        ("drawn", DistillSequenceTask(max_new_tokens=NEW, temperature=DRAWN.temperature, top_p=DRAWN.top_p)),
        ("unaligned", DistillUnalignedTask()),
    ):
        models = {"student": trained(llama, "small"), "teacher": frozen("large")}
        models["teacher"].tokenizer = make_tokenizer(["a b", "c d"]) if name == "unaligned" else None
        found[name] = fit(task, models, PLUGINS, data(distributed.world_size()), steps=STEPS)[1]
    return found


# The same by hand


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first label that something predicts; [] without one."""
    counted = [index for index, label in enumerate(example.labels) if label != IGNORED and index > 0]
    return [int(token) for token in example.input_ids[: counted[0]]] if counted else []


@torch.no_grad()
def write(model: Any, prompt: list[int], draw: Callable[[Tensor, int], Tensor] | None = None) -> list[int]:
    """An answer token by token, without padding or cache: each the largest score, or the largest of a draw.

    Args:
        draw: From (1, V) scores and the token's place to scores.
    """
    answer: list[int] = []
    while prompt and len(answer) < NEW and not (answer and answer[-1] in ENDS):
        scores = model(input_ids=torch.tensor([prompt + answer])).logits[:, -1]
        answer.append(int((draw(scores, len(answer)) if draw is not None else scores).argmax()))
    return answer


def draws_of(options: GenerationOptions, *, step: int, index: int) -> Callable[[Tensor, int], Tensor]:
    """Draws for one example, whatever stands beside it in a batch."""
    draws = TokenDraws(options, row_seeds(0, step, [index]), prompt_width=0)
    return lambda scores, place: draws(torch.zeros(1, place, dtype=torch.long), scores)


def answer_losses(model: Any, prompt: list[int], answer: list[int]) -> list[Tensor]:
    """The cross-entropy of each token of an answer."""
    if not answer:
        return []
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    start = len(prompt) - 1
    return list(F.cross_entropy(logits[start : start + len(answer)], torch.tensor(answer), reduction="none"))


def reference_run(
    options: GenerationOptions | None = None,
) -> tuple[dict[str, Tensor], list[list[int]], list[float]]:
    """Returns the student's weights, the answers' lengths by step, and the scores on held-out text before and after.

    Args:
        options: Of the draws; None: greedy.
    """
    student: Any = llama("small").double()
    teacher: Any = llama("large").eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=LR)
    texts, lengths = shared_texts(), []
    scores = [held_out_score(student, teacher)]
    for step, window in enumerate(windows(len(texts), BATCH, steps=STEPS)):
        prompts = [prompt_of(texts[index]) for index in window]
        draws = [draws_of(options, step=step, index=index) if options else None for index in window]
        answers = [write(teacher, *pair) for pair in zip(prompts, draws, strict=True)]
        losses = [loss for pair in zip(prompts, answers, strict=True) for loss in answer_losses(student, *pair)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append([len(answer) for answer in answers])
    scores.append(held_out_score(student, teacher))
    return copy.deepcopy(student.state_dict()), lengths, scores


@torch.no_grad()
def held_out_score(student: Any, teacher: Any) -> float:
    prompts = [prompt_of(example) for example in shared_validation()]
    losses = [loss for prompt in prompts for loss in answer_losses(student, prompt, write(teacher, prompt))]
    return float(torch.stack(losses).mean())
