"""Two text encoders that learn to give a query and its document the same vector (a bi-encoder, InfoNCE)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.scores.embeddings import retrieval_ranks, run_encoder, sentence_vectors
from trainer import Batch, ConfigError, Metric, StepOutput, TaskModule, gather_with_gradient

RANKS = (1, 5)  # of the retrieval accuracies


class DualEncoderTask(TaskModule):
    """Trains both encoders on one InfoNCE loss (van den Oord et al., arXiv:1807.03748), in both directions.

    The negatives of a query are the documents of all ranks' micro-batches, and their encoder gets its gradient from the
    losses of all ranks. So the update depends on micro-batch times ranks, and not on how that product is cut.

    Batches have `query_input_ids` and `query_attention_mask`, (B, T), and the same of `document`.

    Args:
        query: Name of the model that encodes queries.
        document: Name of the model that encodes documents.
        temperature: Divides the cosine similarities.
    """

    batch_fields = tuple(f"{side}_{part}" for side in ("query", "document") for part in ("input_ids", "attention_mask"))
    reads_one_batch = True

    def __init__(self, *, query: str = "query", document: str = "document", temperature: float = 0.05) -> None:
        if not temperature > 0:
            raise ConfigError(f"task.temperature={temperature}: must be above 0")
        self.query, self.document, self.temperature = query, document, temperature
        self.one_loss = (query, document)
        self._seen: list[Tensor] = []  # of the running validation: (B, 2, D), queries and documents

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        if self.query == self.document:
            return [f"task.query and task.document are both {self.query!r}; name two models"]
        return [
            f"task.{role}={name}: models has no {name}, only {', '.join(trainable)}"
            for role, name in (("query", self.query), ("document", self.document))
            if name not in trainable
        ]

    def count_items(self, batch: Batch) -> int:
        return len(batch["query_input_ids"])

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        queries, documents = self._encode(batch)
        losses, is_right = self._contrast(queries, documents)
        # Of a filler no row is left, and the sum of none is a zero that keeps its graph.
        return StepOutput(sums={"joint": losses.sum()}, metrics={"batch_accuracy": (is_right.sum(), len(is_right))})

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        if batch_idx == 0:
            self._seen.clear()
        queries, documents = self._encode(batch)
        self._seen.append(torch.stack([queries, documents], dim=1))
        losses, _ = self._contrast(queries, documents)
        return {"contrastive_loss": (losses.sum(), len(losses))}

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns how often a query's own document is among the nearest of the whole validation set."""
        vectors, _ = gather_with_gradient(torch.cat(self._seen))
        self._seen.clear()
        queries, documents = vectors.unbind(1)
        rank = retrieval_ranks(queries, documents)
        found = {f"top{k}_accuracy": (rank <= k).float().mean().item() for k in RANKS}
        return {**found, "mean_reciprocal_rank": rank.reciprocal().float().mean().item()}

    def _encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns unit vectors of this rank's queries and documents, (B, D) each; of a filler none."""
        count = 0 if self.trainer.is_filler else self.count_items(batch)
        queries, documents = self._embed(self.query, "query", batch), self._embed(self.document, "document", batch)
        if queries.shape != documents.shape:
            raise ConfigError(
                f"models.{self.query} gives vectors of size {queries.shape[1]}, models.{self.document} of size "
                f"{documents.shape[1]}; to be compared they must have the same"
            )
        return queries[:count], documents[:count]

    def _embed(self, name: str, field: str, batch: Batch) -> Tensor:
        output, _ = run_encoder(self.models[name], batch, field)
        return sentence_vectors(output, batch[f"{field}_attention_mask"])

    def _contrast(self, queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a loss per pair of this rank, (B,), against all ranks' pairs, and whether the query found its own."""
        vectors, first = gather_with_gradient(torch.stack([queries, documents], dim=1))
        all_queries, all_documents = vectors.unbind(1)  # (N, D)
        own = torch.arange(first, first + len(queries), device=queries.device)
        to_documents = queries @ all_documents.T / self.temperature  # (B, N)
        to_queries = documents @ all_queries.T / self.temperature
        losses = F.cross_entropy(to_documents, own, reduction="none") + F.cross_entropy(
            to_queries, own, reduction="none"
        )
        return losses / 2, to_documents.argmax(1) == own
