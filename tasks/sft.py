"""Supervised fine-tuning: a language model learns the right next tokens. The smallest task, the one to read first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.logits.fused import fused_loss
from tasks.logits.heads import tap_heads
from tasks.losses import cross_entropy
from tasks.roles import find_member_problems
from tasks.text.language import BATCH_FIELDS, MASKS, counted_logits, next_tokens, perplexities
from tasks.values import find_role_problems
from trainer import LOGITS, Batch, ConfigError, Metric, StepOutput, TaskModule


class SFTTask(TaskModule):
    """Trains the student by cross-entropy, a mean over the tokens of the global batch.

    Args:
        student: Name of the trained model.
        mask: The tokens that count: "completion", those with a label, or "all", the prompts' too.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True

    def __init__(self, *, student: str = "student", mask: str = "completion") -> None:
        problems = find_role_problems({"student": student})
        if mask not in ("completion", "all"):
            problems.append(f"task.mask is {mask!r}; it must be completion, the answers' tokens, or all")
        if problems:
            raise ConfigError(*problems)
        self.reads = {student: LOGITS}
        self.student, self.mask = student, MASKS[mask]
        self.metric_labels = {"cross_entropy": "cross-entropy (nats)", "token_accuracy": "token accuracy"}

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        return find_member_problems(trainable, stage=stage, trained=[("student", self.student)])

    def setup(self, stage: str) -> None:
        self.taps, _ = tap_heads([self.models[self.student]], vocabulary=None, device=self.trainer.device)

    def count_items(self, batch: Batch) -> Tensor:
        return self.mask(batch).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        loss, metrics = self.score(batch)
        named = {f"{self.student}/{name}": value for name, value in metrics.items()}
        return StepOutput(sums={f"{self.student}/cross_entropy": loss}, metrics=named)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        return self.score(batch)[1]

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def score(self, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Returns the summed loss of the tokens that count, (), and what is logged as (sum, count)."""
        counted = self.mask(batch)
        labels = next_tokens(batch, counted)

        def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            total = cross_entropy(logits, labels[rows]).sum()
            return total, torch.stack([total.detach(), (logits.argmax(-1) == labels[rows]).sum()])

        model = self.models[self.student]
        tap = self.taps.get(model)
        if tap is None:
            total, sums = loss(counted_logits(model, batch, counted), slice(None))
        else:  # the same without ever holding the logits of all tokens
            total, sums = tap.run(batch, counted, lambda hidden, head: fused_loss(hidden, head, loss))["head"]
        return total, {"cross_entropy": (sums[0], len(labels)), "token_accuracy": (sums[1], len(labels))}
