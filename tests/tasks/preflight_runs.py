"""Distillations with and without preflight on real engines, in one process or several ranks."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.distill import DistillTask
from tasks.teaching.preflight import CHECKS
from tests.tasks.task_runs import VOCABULARY, llama, make_texts, shared_texts, shared_validation, zero
from tests.trainer.test_trainer import reset_accelerate
from trainer import Callback, ConfigError, ModelSpec, MultiModelTrainer, TaskModule, TrainingData, distributed
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.text import TextDataset
from trainer.handle import gathered_state_dict
from trainer.models import causal_lm

Found = dict[str, Any]
TERMS = {"forward_kl": {}, "cross_entropy": {"mask": "all"}}
OFF = dict.fromkeys(CHECKS, False)


class Checked(DistillTask):
    """Distils after a preflight with these options; `tokenizers` are taken for the models' own where they are given."""

    def __init__(self, options: Mapping[str, bool], **settings: Any) -> None:
        super().__init__(preflight=options, **settings)
        self.tokenizers: dict[str, Any] = {}
        self.detaches = False

    def on_fit_start(self) -> None:
        self.trainer.tokenizers.update(self.tokenizers)
        super().on_fit_start()


class Watch(Callback):
    """Notes what each step and validation gave, and the random states at the start of training."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self.draws: list[float] = []

    def on_train_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self.draws = [random.random(), float(np.random.random()), float(torch.rand(()))]

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.steps.append(dict(metrics))

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.validations.append(dict(metrics))


def noisy_llama() -> LlamaForCausalLM:
    """Returns a student whose training draws numbers: with dropout."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.3,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config)


def make_teacher(folder: Path) -> Path:
    """Leaves the weights of a teacher that knows the examples by heart."""
    torch.manual_seed(0)
    model = llama("teacher").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = PaddingCollator(0)([TextDataset(shared_texts(), prompts=[])[i] for i in range(12)])
    batch["labels"] = torch.where(batch["attention_mask"] != 0, batch["input_ids"], -100)
    for _ in range(40):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "teacher")
    return folder / "teacher"


def load_teacher(place: Path) -> nn.Module:
    return causal_lm(str(place), dtype=torch.float32)


def spec(build: Any, *, trainable: bool = True, **options: Any) -> ModelSpec:
    optimizer = functools.partial(torch.optim.SGD, lr=0.05) if trainable else None
    return ModelSpec(build=build, trainable=trainable, dtype=torch.float32, optimizer=optimizer, **options)


def data(texts: list[Example] | None = None, *, validates: bool = False, batch_size: int = 2) -> TrainingData:
    texts = shared_texts() if texts is None else texts
    return TrainingData(
        train=TextDataset(texts, prompts=[]),
        validation=TextDataset(shared_validation(), prompts=[]) if validates else None,
        batch_size=batch_size,
        collate=PaddingCollator(0),
    )


def fit(
    options: Mapping[str, bool],
    *,
    teacher: ModelSpec,
    student: ModelSpec | None = None,
    stage: int = 1,
    task: Checked | None = None,
    texts: TrainingData | None = None,
    teacher_plugin: Mapping[str, Any] | None = None,
) -> Found:
    reset_accelerate()
    watch = Watch()
    plugins = {"student": zero(stage), "teacher": teacher_plugin or {"replicate": True}}
    trainer = MultiModelTrainer(
        plugins, max_steps=3, log_every=1, gradient_accumulation_steps=2, callbacks={"watch": watch}
    )
    models = {"student": student or spec(noisy_llama), "teacher": teacher}
    trainer.fit(task or Checked(options, terms=TERMS), models=models, data=texts or data())
    student_model = trainer.models["student"]
    student_model.settle()
    return {
        "weights": gathered_state_dict(student_model.module),
        "steps": watch.steps,
        "validations": watch.validations,
        "draws": watch.draws,
        "engine": (type(student_model.engine).__name__, student_model.stage, student_model.num_updates),
    }


def refusal(**arguments: Any) -> list[str]:
    """Returns the problems of a run that must be refused before its first update."""
    try:
        fit(**arguments)
    except ConfigError as error:
        return error.problems
    return []


def run_stages(place: Path) -> Found:
    """Returns, by ZeRO stage, what a run gave with all checks and without any; and what differing ranks are told."""
    logging.getLogger("tasks.distill").setLevel(logging.ERROR)
    found: Found = {}
    for stage in range(4):
        teacher = spec(functools.partial(load_teacher, place), trainable=False)
        plugin = zero(3) if stage == 3 else None
        texts = data(validates=stage in (1, 3))
        arguments: Any = {"teacher": teacher, "stage": stage, "texts": texts, "teacher_plugin": plugin}
        found[f"stage {stage}"] = [fit(options, **arguments) for options in ({}, OFF)]
    rank = distributed.rank()
    if distributed.world_size() > 1:
        terms = TERMS if rank == 0 else {**TERMS, "forward_kl": {"weight": 0.5}, "reverse_kl": {}}
        texts = data(make_texts(12, seed=0), validates=True)
        found["terms"] = refusal(options={}, teacher=teacher, task=Checked({}, terms=terms), texts=texts)
        found["length"] = refusal(options={}, teacher=teacher, texts=data(make_texts(12 + rank, seed=0)))
        # On one rank only: the tokens of rank 1 have no label, so that its teacher scores nothing but prompts.
        blank = [Example(input_ids=text.input_ids, labels=np.full_like(text.labels, -100)) for text in shared_texts()]
        terms = {"forward_kl": {}}
        half = data(shared_texts() if rank == 0 else blank)
        found["half"] = refusal(options={}, teacher=teacher, task=Checked({}, terms=terms), texts=half)
        found["none"] = refusal(options={}, teacher=teacher, task=Checked({}, terms=terms), texts=data(blank))
    return found
