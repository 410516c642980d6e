"""A validation's numbers: the same however the held-out examples are cut into batches and ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.teaching.quality import Quality, derive_quality
from tests.ranks import run_ranks
from trainer import Batch, Metric, TaskModule, TrainingData
from trainer.data.sources import ValidationSources, name_sources
from trainer.evaluation import evaluate

LENGTHS = [5, 2, 9, 3, 12, 2, 7, 4, 1, 6, 30]  # tokens with a label
SOURCES = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 2]
VOCABULARY, TIME = 7, 32


class KnownLogits(TaskModule):
    """Scores logits that stand in the examples."""

    quality = Quality(sources=("chat", "code", "wiki"), edges=(4, 8, 16))

    def count_items(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        counted = batch["labels"][:, 1:] != -100
        sums = self.quality.sums(
            batch["student"][:, :-1][counted],
            batch["teacher"][:, :-1][counted],
            batch["labels"][:, 1:][counted],
            self.quality.groups_of(batch, counted),
        )
        return self.quality.metrics(sums)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return derive_quality(metrics)


class NeverCounted(TaskModule):
    """Measures something of which there is no item, and something that only another metric needs."""

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        return {"seen": (3.0, 2), "unseen": (0.0, 0), "_half": 0.5, "reference/_half": 0.25}

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {"double": 2 * metrics["_half"], "_quarter": 0.25}


def examples() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    items = []
    for length, source in zip(LENGTHS, SOURCES, strict=True):
        student, teacher = 2 * torch.randn(2, TIME, VOCABULARY, generator=random)
        labels = torch.full((TIME,), -100)
        labels[1 : length + 1] = torch.randint(VOCABULARY, (length,), generator=random)
        rows = {"labels": labels, "input_ids": labels.clamp(min=0), "source": torch.full((TIME,), source)}
        items.append({**rows, "student": student, "teacher": teacher})
    return items


def validated(task: TaskModule, *, batch_size: int, rank: int = 0, world_size: int = 1) -> Any:
    data = name_sources(TrainingData(validation=examples(), batch_size=batch_size), {})  # type: ignore[arg-type]
    loader = ValidationSources(data, rank=rank, world_size=world_size, limit_batches=None)
    trainer: Any = SimpleNamespace(
        validation_loader=loader, device=torch.device("cpu"), seed=0, rank=rank, task=task, logged={}
    )
    trainer.enter_batch = lambda **_: None
    return evaluate(trainer, on_batch=None, limit_batches=None)


def validated_on_ranks() -> Any:
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = validated(KnownLogits(), batch_size=2, rank=rank, world_size=world_size)
    torch.distributed.destroy_process_group()
    return found


def test_numbers_do_not_depend_on_the_cut_into_batches_and_ranks(tmp_path: Path) -> None:
    own, reference = validated(KnownLogits(), batch_size=len(LENGTHS))

    for found, of_teacher in (
        *(validated(KnownLogits(), batch_size=size) for size in (1, 3)),
        *run_ranks(validated_on_ranks, folder=tmp_path, world_size=2),
    ):
        assert found == pytest.approx(own, rel=1e-12, abs=1e-12)
        assert of_teacher == pytest.approx(reference, rel=1e-12, abs=1e-12)

    metrics = ("cross_entropy", "forward_kl", "reverse_kl", "top1_agreement")
    groups = ("by_source/chat", "by_source/code", "by_source/wiki", "by_length/1-4", "by_length/5-8", "by_length/9-16",
              "by_length/17-up")  # fmt: skip
    names = {*metrics, *(f"{group}/{metric}" for group in groups for metric in metrics), "perplexity", "ece"}
    assert own.keys() == reference.keys() == {f"val/{name}" for name in names}
    by_length = sum(
        own[f"val/{group}/forward_kl"] * count for group, count in zip(groups[3:], (12, 18, 21, 30), strict=True)
    )
    assert by_length / sum(LENGTHS) == pytest.approx(own["val/forward_kl"])


def test_what_only_others_follow_from_and_what_was_never_seen_is_told_to_nobody() -> None:
    own, reference = validated(NeverCounted(), batch_size=4)

    assert own == {"val/seen": 1.5, "val/double": 1.0}
    assert reference == {"val/double": 0.5}
