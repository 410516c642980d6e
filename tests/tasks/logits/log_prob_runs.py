"""Runs of a loss of whole rows' log-probabilities through real engines, and the same training in plain PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import tasks.logits.log_probs
from tasks.logits.heads import HeadTap
from tasks.logits.log_probs import row_sums, token_log_probs
from tasks.text.language import completion_mask
from tests.tasks.logits.fused_runs import batch_of, build
from tests.tasks.normalisation_runs import Weights
from tests.tasks.sft_runs import run_sft
from tests.tasks.task_runs import (
    LR,
    SHARED,
    fit,
    shared_texts,
    shared_validation,
    texts_data,
    trained,
    windows,
    zero,
)
from trainer import Batch, Metric, StepOutput, TaskModule

# Name to the ZeRO stage, what the model is, and how many logits are held for the backward; None: the head is no tap.
CASES: dict[str, tuple[int, str, int | None]] = {
    "0": (0, "plain", 0),
    "1, tied": (1, "tied", 0),
    "2, checkpointed": (2, "checkpointed", 2**20),
    "3": (3, "plain", 0),
    "3, tied": (3, "tied", 0),
    "3, checkpointed": (3, "checkpointed", 0),
    "3, held": (3, "tied", 2**20),
    "3, dense": (3, "tied", None),
}
WARM = 0.7  # temperature of the second reading
BONUS = 0.1  # weight of the entropy


class RowsTask(TaskModule):
    """A sigmoid of each row's log-probability, which is known once the whole row is, and an entropy bonus.

    Two forwards with a graph come before one backward, and one without between them.
    """

    def __init__(self, *, is_tapped: bool) -> None:
        self.is_tapped, self.empty, self.drift = is_tapped, 0, 0.0

    def setup(self, stage: str) -> None:
        tap = HeadTap.of(self.models["student"])
        assert isinstance(tap, HeadTap), tap
        self.tap = tap if self.is_tapped else None

    def count_items(self, batch: Batch) -> int:
        return len(batch["input_ids"])

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        model, counted = self.models["student"], completion_mask(batch)
        self.empty += not counted.any()
        cold = token_log_probs(model, batch, counted, tap=self.tap)
        with torch.no_grad():
            again = token_log_probs(model, batch, counted, tap=self.tap)
        warm = token_log_probs(model, batch, counted, tap=self.tap, temperature=WARM, entropy_gradient=True)
        self.drift = max([self.drift, *(again.log_probs - cold.log_probs).detach().abs().tolist()])
        assert warm.entropy is not None
        loss = loss_of(*(row_sums(values, counted) for values in (cold.log_probs, warm.log_probs, warm.entropy)))
        return StepOutput(sums={"student": loss})

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        found = token_log_probs(self.models["student"], batch, completion_mask(batch), tap=self.tap)
        return {"log_probs": (found.log_probs.sum(), len(found.log_probs))}


def loss_of(cold: Tensor, warm: Tensor, entropy: Tensor) -> Tensor:
    """The summed loss of rows, of each (B,)."""
    return (F.softplus(-0.1 * cold) + 0.05 * warm.square() - BONUS * entropy).sum()


def run_token_tasks(folder: Path) -> dict[str, Any]:
    """Returns what each case found, of log-probabilities and of task=sft; weights are on rank 0 only."""
    from trainer import distributed

    world_size = distributed.world_size()
    found = {name: run_case(world_size, *case) for name, case in CASES.items()}
    return {"log-probs": found, "sft": run_sft(world_size)}


def run_case(world_size: int, stage: int, kind: str, held: int | None) -> dict[str, Any]:
    task = RowsTask(is_tapped=held is not None)
    models = {"student": trained(lambda name: build(kind), "student", lr=LR / 10)}
    data = texts_data(shared_texts(), shared_validation(), batch_size=1)
    plugins = {"student": zero(stage)}
    with mock.patch.object(tasks.logits.log_probs, "KEPT", held or 0):
        _, found = fit(task, models, plugins, data, gradient_accumulation_steps=SHARED // world_size)
    return {**found, "empty": task.empty, "drift": task.drift}


@functools.cache
def plain_weights(kind: str) -> Weights:
    """Returns the weights after the same steps by plain PyTorch in float64."""
    model: Any = build(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR / 10)
    for window in windows(len(shared_texts()), SHARED):
        batch = batch_of(window)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        logits = model(**inputs).logits[:, :-1]
        labels, counted = batch["labels"][:, 1:], completion_mask(batch)
        sums = []
        for temperature in (1.0, WARM):
            log_p = torch.log_softmax(logits / temperature, -1)
            picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            sums.append((picked * counted).sum(-1))
        sums.append((-(log_p.exp() * log_p).sum(-1) * counted).sum(-1))
        optimizer.zero_grad()
        (loss_of(*sums) / len(window)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
