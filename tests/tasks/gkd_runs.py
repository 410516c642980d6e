"""Runs of on-policy distillation on real engines, and the same by hand, an example at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.generation import GenerationOptions, row_seeds
from tasks.generation.draws import TokenDraws
from tasks.gkd import GKDTask
from tests.tasks.distill_runs import QUIET
from tests.tasks.sequence_runs import ENDS, prompt_of, tokenizer
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
from tests.tasks.teacher_cache.cache_runs import record
from tests.trainer.test_trainer import reset_accelerate
from trainer import IGNORED, CheckpointPlan, MultiModelTrainer, TrainingData
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.text import TextDataset
from trainer.handle import gathered_state_dict

STEPS, WINDOW = 3, 6
OPTIONS = GenerationOptions(max_new_tokens=6, temperature=1.5)
BETA, LOSS_TEMPERATURE, WEIGHT = 0.3, 2.0, 0.5
TERMS: dict[str, dict[str, Any]] = {
    "forward_kl": {"temperature": LOSS_TEMPERATURE},
    "jsd": {"function": "generalised_jsd", "beta": BETA, "weight": WEIGHT, "mask": "all"},
}
# Who writes in each step of seed 0, by the task's options
AUTHORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "own": ({"lmbda": 1.0}, ["student"] * 3),
    "mixed": ({"lmbda": 0.6}, ["student", "data", "student"]),
    "scheduled": ({"lmbda": {"start": 0.0, "end": 1.0, "steps": 3}}, ["data", "data", "student"]),
    "teacher": ({"lmbda": 0.6, "off_policy": "teacher"}, ["student", "teacher", "student"]),
}
# Case: authors, student's stage, teacher's stage (None: a replica), micro-batches of a window on each rank
CASES: dict[str, tuple[str, int, int | None, int]] = {
    "own, zero2, sharded teacher": ("own", 2, 3, 1),
    "mixed, zero3": ("mixed", 3, None, 1),
    "mixed, zero3, a row at a time": ("mixed", 3, 3, -1),
    "mixed, zero2, accumulated": ("mixed", 2, None, 3),
    "scheduled, zero0": ("scheduled", 0, None, 1),
    "teacher, zero1, sharded teacher": ("teacher", 1, 3, 1),
}


def make_data(batch_size: int) -> TrainingData:
    return TrainingData(
        train=TextDataset(shared_texts(), prompts=[]),
        validation=TextDataset(shared_validation(), prompts=[]),
        batch_size=batch_size,
        collate=PaddingCollator(PAD),
        tokenizer=tokenizer(),
    )


def make_task(**options: Any) -> GKDTask:
    generation = {"max_new_tokens": OPTIONS.max_new_tokens, "temperature": OPTIONS.temperature}
    return GKDTask(terms=TERMS, generation=generation, preflight=QUIET, **options)


def run_case(name: str, world_size: int) -> dict[str, Any]:
    authors, stage, teacher_stage, accumulation = CASES[name]
    models = {"student": trained(llama, "small"), "teacher": frozen("large")}
    plugins = {"student": zero(stage), "teacher": {"replicate": True} if teacher_stage is None else zero(teacher_stage)}
    rows = WINDOW // world_size
    accumulation = rows if accumulation == -1 else accumulation
    task, data = make_task(**AUTHORS[authors][0]), make_data(rows // accumulation)
    return fit(task, models, plugins, data, steps=STEPS, gradient_accumulation_steps=accumulation)[1]


def run_cached(folder: Path, world_size: int) -> dict[str, Any]:
    """Returns what a run found whose teacher was recorded: the cache serves the second step, the teacher the others."""
    data = make_data(WINDOW // world_size)
    record(folder, name="large", data=data, top_k=VOCABULARY, temperatures=[1.0, LOSS_TEMPERATURE], mask="all")
    models = {"student": trained(llama, "small"), "teacher": frozen("large")}
    plugins = {"student": zero(2), "teacher": {"replicate": True}}
    task = make_task(cache={"path": str(folder)}, **AUTHORS["mixed"][0])
    return fit(task, models, plugins, data, steps=STEPS)[1]


def run_part(folder: Path, *, stop_at_step: int | None = None, resume: Path | None = None) -> dict[str, Tensor]:
    """Returns the student's weights after a run, or the part of one."""
    from trainer import distributed

    reset_accelerate()
    trainer = MultiModelTrainer(
        {"student": zero(2), "teacher": {"replicate": True}},
        max_steps=STEPS,
        stop_at_step=stop_at_step,
        folder=folder,
        checkpoint=CheckpointPlan(),
    )
    models = {"student": trained(llama, "small"), "teacher": frozen("large")}
    data = make_data(WINDOW // distributed.world_size())
    trainer.fit(make_task(**AUTHORS["mixed"][0]), models=models, data=data, resume=resume)
    return gathered_state_dict(trainer.models["student"].module)


def run_cases(folder: Path) -> dict[str, Any]:
    """Returns what each case found, and the weights of a run and of one that was ended and went on."""
    from trainer import distributed

    found: dict[str, Any] = {name: run_case(name, distributed.world_size()) for name in CASES}
    found["cached"] = run_cached(folder / "cache", distributed.world_size())
    whole = run_part(folder / "whole")
    run_part(folder / "parts", stop_at_step=2)
    found["resumed"] = {"whole": whole, "parts": run_part(folder / "parts", resume=folder / "parts")}
    return found


# The same by hand


@torch.no_grad()
def write(model: Any, prompt: list[int], *, seed: int | None) -> list[int]:
    """An answer token by token: one row, no padding, no cache."""
    answer: list[int] = []
    while prompt and len(answer) < OPTIONS.max_new_tokens and not (answer and answer[-1] in ENDS):
        tokens = torch.tensor([prompt + answer])
        scores = model(input_ids=tokens).logits[:, -1]
        if seed is not None:
            scores = TokenDraws(OPTIONS, [seed], prompt_width=len(prompt))(tokens, scores)
        answer.append(int(scores.argmax()))
    return answer


def reference(authors: str) -> dict[str, Any]:
    """Returns the trained weights, and of each step the answers' lengths and the terms, and the scores of own text."""
    student: Any = llama("small").double()
    teacher: Any = llama("large").double().eval()
    texts = shared_texts()
    found: dict[str, Any] = {"lengths": [], "terms": [], "own": [own_text_score(student, teacher)]}
    for step, window in enumerate(windows(len(texts), WINDOW, steps=STEPS), start=1):
        author = AUTHORS[authors][1][step - 1]
        rows = [
            row_of(texts[index], {"student": student, "teacher": teacher}.get(author), step, index) for index in window
        ]
        values = [value for row in rows for value in losses(*row, student, teacher)]
        means = {name: torch.cat([value[name] for value in values]).mean() for name in TERMS}
        (means["forward_kl"] + WEIGHT * means["jsd"]).backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
        asked = [row for row, index in zip(rows, window, strict=True) if prompt_of(texts[index])]
        found["lengths"].append([sum(labelled) for _, labelled in asked])
        found["terms"].append({name: mean.item() for name, mean in means.items()})
    found["own"].append(own_text_score(student, teacher))
    return found | {"weights": {name: value.detach() for name, value in student.named_parameters()}}


def row_of(example: Example, author: Any, step: int, index: int) -> tuple[list[int], list[bool]]:
    """Returns an example's tokens, and which of them are its answer."""
    if author is None:
        has_label = [bool(label != IGNORED) and place > 0 for place, label in enumerate(example.labels)]
        return [int(token) for token in example.input_ids], has_label
    prompt = prompt_of(example)
    answer = write(author, prompt, seed=row_seeds(0, step, [index])[0])
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def losses(tokens: list[int], is_answer: Sequence[bool], student: Any, teacher: Any) -> list[dict[str, Tensor]]:
    """Returns each term's losses of one row; none of a row that predicts nothing."""
    if len(tokens) < 2:
        return []
    z, w = (model(input_ids=torch.tensor([tokens])).logits[0, :-1] for model in (student, teacher))
    w = w.detach()
    q, p = z.softmax(-1), w.softmax(-1)
    m = BETA * p + (1 - BETA) * q
    jsd = BETA * kl(p, m) + (1 - BETA) * kl(q, m)
    tempered = kl((w / LOSS_TEMPERATURE).softmax(-1), (z / LOSS_TEMPERATURE).softmax(-1))
    return [{"forward_kl": LOSS_TEMPERATURE**2 * tempered[torch.tensor(is_answer[1:])], "jsd": jsd}]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


@torch.no_grad()
def own_text_score(student: Any, teacher: Any) -> float:
    """Returns KL(teacher || student) of a token of the student's greedy answers to the held-out prompts."""
    values = []
    for example in shared_validation():
        prompt = prompt_of(example)
        answer = write(student, prompt, seed=None)
        if answer:
            z, w = (
                model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                for model in (student, teacher)
            )
            values.append(kl(w.softmax(-1), z.softmax(-1)))
    return float(torch.cat(values).mean())
