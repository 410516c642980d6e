"""Deep mutual learning: models of one vocabulary teach each other while they learn (Zhang et al., arXiv:1706.00384)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.losses import cross_entropy, forward_kl
from tasks.text.language import BATCH_FIELDS, completion_mask, counted_logits, next_tokens, perplexities
from tasks.text.vocabulary import common_vocabulary
from trainer import Batch, ConfigError, Metric, StepOutput, TaskModule


class MutualTask(TaskModule):
    """Trains each model on cross-entropy plus `weight` times the mean of KL(peer || model) over its peers.

    A peer's distribution counts as given: no gradient flows into it from another model's loss. A frozen model teaches
    the others and learns nothing.

    Args:
        weight: Of the peers' part; 1 in the paper.
        temperature: Divides the logits of that part, which comes times its square.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True

    def __init__(self, *, weight: float = 1.0, temperature: float = 1.0) -> None:
        if not 0 <= weight < math.inf:
            raise ConfigError(f"task.weight={weight}: must be a finite number of at least 0")
        if not 0 < temperature < math.inf:
            raise ConfigError(f"task.temperature={temperature}: must be a finite number above 0")
        self.weight, self.temperature = weight, temperature
        self.vocabulary: int | None = None

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        if len(trainable) < 2:
            return [f"task=mutual needs at least two models to learn from each other; models has {list(trainable)}"]
        return []

    def setup(self, stage: str) -> None:
        self.vocabulary = common_vocabulary(list(self.models.values()), tokenizer=self.trainer.tokenizer)

    def count_items(self, batch: Batch) -> Tensor:
        return completion_mask(batch).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        output = StepOutput()
        logits, labels = self._score(batch)
        for model in self.models.values():
            if not model.is_updating:
                continue
            name = model.name
            entropy, divergence = cross_entropy(logits[name], labels), self._peers(name, logits)
            output.sums[name] = (entropy + self.weight * divergence).sum()
            output.metrics[f"{name}/cross_entropy"] = (entropy.detach().sum(), len(labels))
            output.metrics[f"{name}/peer_kl"] = (divergence.detach().sum(), len(labels))
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        logits, labels = self._score(batch)
        metrics: dict[str, Metric] = {}
        for name in self.models:
            metrics[f"{name}/cross_entropy"] = (cross_entropy(logits[name], labels).sum(), len(labels))
            metrics[f"{name}/peer_kl"] = (self._peers(name, logits).sum(), len(labels))
        return metrics

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def _score(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Returns each model's logits, (N, V), and the labels, (N,), of the positions that count."""
        counted = completion_mask(batch)
        logits = {}
        for model in self.models.values():
            with torch.set_grad_enabled(model.is_updating and torch.is_grad_enabled()):
                logits[model.name] = counted_logits(model, batch, counted, vocabulary=self.vocabulary)
        return logits, next_tokens(batch, counted)

    def _peers(self, name: str, logits: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean over the peers of KL(peer || model) per token, (N,)."""
        values = [
            forward_kl(logits[name], logits[peer].detach(), temperature=self.temperature)
            for peer in logits
            if peer != name
        ]
        return torch.stack(values).mean(0)
