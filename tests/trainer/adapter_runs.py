"""Runs of models of which only a part is trained, or whose weights are tied, under each ZeRO stage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.trainer.engine_runs import Found, engine_of, token_data, whole_weights, zero
from tests.trainer.test_export import tiny_tokenizer
from tests.trainer.test_trainer import reset_accelerate
from trainer import Callback, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.export import export_model, rescore
from trainer.models import causal_lm
from trainer.plan import FIELDS, plan_column

STAGES = (0, 1, 2, 3)
EXPORTED = (1, 3)
BUILD = {"_target_": "my_package.make_net"}
LR = 0.05
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
NET_LORA = {"r": 2, "target_modules": ["0"], "modules_to_save": ["2"]}
FROZEN = ["model.embed_tokens.weight", "*.mlp.*"]
TOKENS = torch.stack([row["input_ids"] for row in token_data(8)])
POINTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Fit(TaskModule):
    """The student predicts the next token, or gives zeros."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses={"student": self.loss(batch)})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch)}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        student = self.models["student"]
        if "x" in batch:
            return student(batch["x"]).pow(2).mean()
        return cross_entropy(student(input_ids=batch["input_ids"]).logits, batch["input_ids"])


class Start(Callback):
    """Keeps the weights and the outputs of the model before its first update."""

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self.weights, self.outputs = whole_weights(trainer), outputs_of(trainer)


def outputs_of(trainer: MultiModelTrainer) -> Tensor:
    student = trainer.models["student"]
    student.set_training(False)
    with torch.no_grad():
        is_llama = any(isinstance(part, LlamaForCausalLM) for part in student.module.modules())
        outputs = student(input_ids=TOKENS).logits if is_llama else student(POINTS)
    student.set_training(True)
    return outputs.clone()


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))  # from the trainer's seed


def fit(build: Callable[..., nn.Module], *, stage: int, **fields: Any) -> tuple[MultiModelTrainer, Start]:
    """Returns a trainer after two updates of SGD, each on the same 8 examples, and what there was before."""
    reset_accelerate()
    start = Start()
    plugin = zero(stage, stage3_param_persistence_threshold=0) if stage == 3 else zero(stage)
    trainer = MultiModelTrainer({"student": plugin}, max_steps=2, callbacks={"start": start})
    items = [{"x": point} for point in POINTS] if build is make_net else [{"input_ids": row} for row in TOKENS]
    spec = ModelSpec(build=build, dtype=torch.float32, optimizer=functools.partial(torch.optim.SGD, lr=LR), **fields)
    validation = items if "lora" in fields and stage in EXPORTED else None
    data = TrainingData(train=items, validation=validation, batch_size=8 // trainer.world_size)
    trainer.fit(Fit(), models={"student": spec}, data=data)
    return trainer, start


def found_in(trainer: MultiModelTrainer, start: Start) -> Found:
    student = trainer.models["student"]
    return {
        "engine": engine_of(trainer, "student"),
        "zero": type(student.engine.optimizer).__name__,
        "is sharded": all(hasattr(parameter, "ds_id") for parameter in student.module.parameters()),
        "start": start.weights,
        "end": whole_weights(trainer),
        "trained": {name for name, value in student.module.named_parameters() if value.requires_grad},
        "first outputs": start.outputs,
        "plan": dict(zip(FIELDS, plan_column(student, batch_size=8), strict=True)),
        "counts": (student.num_parameters, student.num_trainable),
    }


def check_stage(folder: Path, stage: int, *, is_short: bool) -> dict[str, Found]:
    llama = functools.partial(causal_lm, str(folder / "llama"))
    checkpointed = functools.partial(llama, gradient_checkpointing=True)
    adapted, adapted_net = fit(llama, stage=stage, lora=LORA), fit(make_net, stage=stage, lora=NET_LORA)
    found = {"lora": found_in(*adapted), "net": found_in(*adapted_net)}
    if is_short:
        return found
    found |= {
        "lora checkpointed": found_in(*fit(checkpointed, stage=stage, lora=LORA)),
        "whole": found_in(*fit(llama, stage=stage)),
        "checkpointed": found_in(*fit(checkpointed, stage=stage)),
        "partly frozen": found_in(*fit(llama, stage=stage, freeze=FROZEN)),
    }
    if stage in EXPORTED:
        found["lora"] |= export(adapted[0], folder / f"llama{stage}", build=llama)
        found["net"] |= export(adapted_net[0], folder / f"net{stage}", build=make_net)
    return found


def export(trainer: MultiModelTrainer, folder: Path, *, build: Callable[..., nn.Module]) -> Found:
    last = outputs_of(trainer)
    export_model(trainer.models["student"], folder, tokenizer=tiny_tokenizer(), build=BUILD)
    scores = rescore(trainer, "student", folder, build=build, tolerance=1e-6)
    return {"last outputs": last, "scores": scores, "before": trainer.before, "after": trainer.after}


def run_checks(folder: Path, is_short: bool) -> dict[int, dict[str, Found]]:
    gc.freeze()  # or each model's collection goes through the half million objects of the imports
    return {stage: check_stage(folder, stage, is_short=is_short) for stage in STAGES}
