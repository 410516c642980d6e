"""Several language models trained at once, each on its own loss, on the same examples or on its own."""

from __future__ import annotations

from torch import Tensor

from tasks.losses import cross_entropy
from tasks.text.language import BATCH_FIELDS, completion_mask, counted_logits, next_tokens, perplexities
from trainer import Batch, Metric, ModelHandle, StepOutput, TaskModule


class DisjointTask(TaskModule):
    """Trains every trainable model on the next token of its examples; no model sees another.

    A model with `models.<name>.data` learns from its own, all others from the shared ones. Frozen models are only
    scored in validations.
    """

    batch_fields = BATCH_FIELDS

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        return {name: completion_mask(part).sum() for name, part in self._parts(batch).items()}

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        output, parts = StepOutput(), self._parts(batch)
        for model in self.models.values():
            if model.is_updating:
                output.sums[model.name] = self._cross_entropy(model, parts[model.name]).sum()
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        for name, part in self._parts(batch).items():
            values = self._cross_entropy(self.models[name], part)
            metrics[f"{name}/cross_entropy"] = (values.sum(), len(values))
        return metrics

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def _parts(self, batch: Batch) -> dict[str, Batch]:
        parts = {name: self.batch_of(name, batch) for name in self.models}
        return {name: part for name, part in parts.items() if part}

    def _cross_entropy(self, model: ModelHandle, batch: Batch) -> Tensor:
        counted = completion_mask(batch)
        return cross_entropy(counted_logits(model, batch, counted), next_tokens(batch, counted))
