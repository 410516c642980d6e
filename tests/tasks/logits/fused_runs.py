"""Runs of a fused loss through real engines, and the same training in plain PyTorch; one spawn serves all stages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head, HeadTap
from tasks.losses import cross_entropy, forward_kl
from tasks.text.language import completion_mask, next_tokens
from tests.tasks.normalisation_runs import Weights
from tests.tasks.task_runs import (
    LR,
    PAD,
    SHARED,
    VOCABULARY,
    fit,
    shared_texts,
    shared_validation,
    texts_data,
    trained,
    windows,
    zero,
)
from trainer import Batch, Metric, ModelHandle, ModelSpec, StepOutput, TaskModule
from trainer.data import PaddingCollator
from trainer.data.text import TextDataset

REPLICATED = {"replicate": True}
# Name to the student's ZeRO stage, the teacher's plugin, and what the student is.
CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "0, replicated": (0, REPLICATED, "plain"),
    "1, zero3": (1, zero(3), "tied"),
    "2, replicated": (2, REPLICATED, "checkpointed"),
    "3, zero3": (3, zero(3), "plain"),
    "3, replicated": (3, REPLICATED, "tied"),
    "3, checkpointed": (3, zero(3), "checkpointed"),
}
STATES = "model.layers.-1.mlp"  # inner states that the loss keeps small
SHARES = {"forward_kl": 0.7, "cross_entropy": 0.3, "size": 0.01}


def build(kind: str) -> LlamaForCausalLM:
    """Returns a student, or the teacher, which is wider."""
    torch.manual_seed(len(kind))
    width = 48 if kind == "teacher" else 32
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=PAD,
        initializer_range=0.15,
        tie_word_embeddings=kind == "tied",
    )
    model: Any = LlamaForCausalLM(config)
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def batch_of(indices: Sequence[int]) -> Batch:
    texts = TextDataset(shared_texts(), prompts=[])
    return PaddingCollator(PAD)([texts[index] for index in indices])


class FusedTask(TaskModule):
    """A forward KL, a cross-entropy, and the size of inner states, as one objective that is weighted already."""

    def __init__(self) -> None:
        self.gathers: dict[str, int] = {}  # how often each model's head was gathered in training steps
        self.empty = 0  # micro-batches without a token that counts
        self.reasons: list[str | None] = []

    def setup(self, stage: str) -> None:
        self.student, self.teacher = self._tap("student"), self._tap("teacher")

    def _tap(self, name: str) -> HeadTap:
        tap = HeadTap.of(self.models[name])
        assert isinstance(tap, HeadTap), tap
        return tap

    def on_train_start(self) -> None:
        batch = batch_of([0, 1])
        self.reasons = [tap.verify(batch, completion_mask(batch)) for tap in (self.student, self.teacher)]

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        return {f"student/{name}": completion_mask(batch).sum() for name in SHARES}

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        with counted_gathers(self.models, self.gathers):
            counted = completion_mask(batch)
            self.empty += not counted.any()
            labels = next_tokens(batch, counted)
            weights = {name: share * self.trainer.loss_weight(f"student/{name}") for name, share in SHARES.items()}
            hidden, teacher, _ = self.teacher.read(batch, counted)

            def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
                kl = forward_kl(logits, teacher.logits(hidden[rows])).sum()
                entropy = cross_entropy(logits, labels[rows]).sum()
                objective = weights["forward_kl"] * kl + weights["cross_entropy"] * entropy
                return objective, torch.stack([kl.detach(), entropy.detach()])

            def compute(states: Tensor, head: Head) -> tuple[Tensor, Tensor]:
                return fused_loss(states, head, loss, tile_rows=3)

            output = self.student.run(batch, counted, compute, [STATES])
        objective, sums = output["head"]
        size = output["hidden"][STATES][:, :-1][counted].square().sum()
        metrics = {"student/forward_kl": (sums[0], len(labels)), "student/cross_entropy": (sums[1], len(labels))}
        return StepOutput(shares={"student": objective + weights["size"] * size}, metrics=metrics)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        counted = completion_mask(batch)
        labels = next_tokens(batch, counted)

        def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            entropy = cross_entropy(logits, labels[rows]).sum()
            return entropy, entropy.reshape(1)

        total, _ = self.student.run(batch, counted, lambda hidden, head: fused_loss(hidden, head, loss))["head"]
        return {"cross_entropy": (total, len(labels))}


@contextmanager
def counted_gathers(models: Any, gathers: dict[str, int]) -> Iterator[None]:
    """Within it, notes how often a sharded head is gathered."""
    originals: list[tuple[Any, str, Any]] = []

    def watch(model: ModelHandle, owner: Any, method: str) -> None:
        original = getattr(owner, method)
        head = model.module.lm_head.weight

        def gather(*args: Any, **kwargs: Any) -> Any:
            listed = next((value for value in (*args, *kwargs.values()) if isinstance(value, list)), [owner])
            gathers[model.name] = gathers.get(model.name, 0) + any(value is head for value in listed)
            return original(*args, **kwargs)

        originals.append((owner, method, original))
        setattr(owner, method, gather)

    for model in models.values():
        for parameter in model.module.parameters() if model.stage == 3 else ():
            watch(model, parameter, "all_gather")
            watch(model, parameter, "all_gather_coalesced")
    try:
        yield
    finally:
        for owner, method, original in originals:
            setattr(owner, method, original)


def run_fused(world_size: int, folder: Path) -> dict[str, Any]:
    """Returns what each case found; weights are on rank 0 only."""
    return {name: run_case(world_size, *case) for name, case in CASES.items()}


def run_case(world_size: int, stage: int, teacher: dict[str, Any], kind: str) -> dict[str, Any]:
    task = FusedTask()
    models = {
        "student": trained(lambda name: build(kind), "student"),
        "teacher": ModelSpec(build=functools.partial(build, "teacher"), trainable=False, dtype=torch.float32),
    }
    data = texts_data(shared_texts(), shared_validation(), batch_size=1)
    plugins = {"student": zero(stage), "teacher": teacher}
    # One example per micro-batch, some of which have no label.
    _, found = fit(task, models, plugins, data, gradient_accumulation_steps=SHARED // world_size)
    return {**found, "gathers": task.gathers, "empty": task.empty, "reasons": task.reasons}


@functools.cache
def plain_weights(kind: str) -> Weights:
    """Returns a student's weights after the same steps by plain PyTorch in float64, from whole logits."""
    student: Any = build(kind).double()
    teacher: Any = build("teacher").double().eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=LR)
    states: list[Tensor] = []
    student.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: states.append(output))
    for window in windows(len(shared_texts()), SHARED):
        batch = batch_of(window)
        counted = completion_mask(batch)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        states.clear()
        logits = student(**inputs).logits[:, :-1][counted]
        with torch.no_grad():
            log_p = torch.log_softmax(teacher(**inputs).logits[:, :-1][counted], -1)
        kl = (log_p.exp() * (log_p - torch.log_softmax(logits, -1))).sum(-1)
        entropy = F.cross_entropy(logits, batch["labels"][:, 1:][counted], reduction="none")
        size = states[0][:, :-1][counted].square().sum(-1)
        terms = {"forward_kl": kl, "cross_entropy": entropy, "size": size}
        loss = torch.stack([SHARES[name] * values.mean() for name, values in terms.items()]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in student.state_dict().items()}
