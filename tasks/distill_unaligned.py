"""Universal logit distillation: a student learns from a teacher of another tokenizer by sorted probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from tasks.losses import cross_entropy
from tasks.losses.unaligned import universal_logit_distance
from tasks.teaching.pairs import find_interpreter_problems, find_naming_problems, find_pair_problems, known_tokenizers
from tasks.text.language import BATCH_FIELDS, completion_mask, counted_logits, next_tokens, perplexities
from tasks.text.sequences import (
    Exchange,
    Interpreter,
    answer_mask,
    continuation,
    exchanges_of,
    find_packing_problem,
    join,
    pad_token,
)
from tasks.text.vocabulary import num_ids
from tasks.values import is_number
from trainer import Batch, ConfigError, Metric, StepOutput, TaskModule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISTANCE = "universal_logit_distance"


class DistillUnalignedTask(TaskModule):
    """Trains the student on cross-entropy plus `weight` times the distance of sorted probabilities to the teacher's.

    The teacher reads the same text in its own tokens and its own chat template. The i-th token of an answer is paired
    with the i-th of the teacher's, up to the end of the shorter (universal logit distillation, arXiv:2402.12030), so
    each distance is between what both predict after i tokens of one answer, though not after the same text. Each part
    is a mean over its own tokens of the global batch: the distance over pairs, the cross-entropy over labels. Of a row
    with several answers the last is paired.

    Args:
        student: Name of the trained model.
        teacher: Name of the frozen model.
        weight: Of the distance; 1.5 in the paper.
        ce_weight: Of the cross-entropy; 1 in the paper.
        temperature: Divides the logits of both within the distance.
    """

    batch_fields, reads_one_batch, reads_packed = BATCH_FIELDS, True, False

    def __init__(
        self,
        *,
        student: str = "student",
        teacher: str = "teacher",
        weight: float = 1.5,
        ce_weight: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        problems = find_naming_problems(student=student, teacher=teacher)
        problems += [
            f"task.{key}={value!r}: must be a finite number of at least 0"
            for key, value in (("weight", weight), ("ce_weight", ce_weight))
            if not (is_number(value) and value >= 0)
        ]
        if weight == 0 and ce_weight == 0:
            problems.append("task.weight and task.ce_weight are both 0; nothing would be trained")
        if not (is_number(temperature) and temperature > 0):
            problems.append(f"task.temperature={temperature!r}: must be a finite number above 0")
        if problems:
            raise ConfigError(*problems)
        self.student, self.teacher, self.reference = student, teacher, teacher
        self.own_tokens = (teacher,)
        self.weight, self.ce_weight, self.temperature = weight, ce_weight, temperature
        self.metric_labels = {
            "cross_entropy": "cross-entropy (nats per token)",
            "nats_per_character": "cross-entropy (nats per character)",
            DISTANCE: "universal logit distance",
        }

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        return find_pair_problems(trainable, student=self.student, teacher=self.teacher, stage=stage)

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        return find_interpreter_problems(tokenizers, student=self.student, teacher=self.teacher)

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        return find_packing_problem(batch, key)

    def setup(self, stage: str) -> None:
        self.source, self.target = known_tokenizers(self.trainer.tokenizers, student=self.student, teacher=self.teacher)
        self.interpreter = Interpreter(self.source, self.target)
        self.sizes = num_ids(self.source), num_ids(self.target)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with the same text in the teacher's tokens, and which positions of both are paired."""
        exchanges = exchanges_of(batch)
        told = self.interpreter.tell(exchanges)
        theirs = join(told, pad_id=pad_token(self.target), device=batch["input_ids"].device)
        lengths = [min(len(own.answer), len(other.answer)) for own, other in zip(exchanges, told, strict=True)]
        return {
            **batch,
            "paired": _mask(exchanges, lengths, like=batch["input_ids"]),
            "teacher": {**theirs, "paired": _mask(told, lengths, like=theirs["input_ids"])},
        }

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        counts: dict[str, int | Tensor] = {f"{self.student}/cross_entropy": completion_mask(batch).sum()}
        if "paired" in batch:  # not in a validation, whose metrics bring their own counts
            counts[f"{self.student}/{DISTANCE}"] = batch["paired"].sum()
        return counts

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        entropies, distances, _ = self._losses(batch)
        output = StepOutput()
        for name, values, weight in (
            ("cross_entropy", entropies, self.ce_weight),
            (DISTANCE, distances, self.weight),
        ):
            output.sums[f"{self.student}/{name}"] = weight * values.sum()
            output.metrics[f"{self.student}/{name}"] = (values.detach().sum(), len(values))
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        entropies, distances, given = self._losses(self.prepare_batch(batch))
        exchanges = exchanges_of(batch)
        # Tokens of two kinds cannot be compared, but characters can.
        characters = _count_characters(self.source, exchanges)
        last = _mask(exchanges, [len(one.answer) for one in exchanges], like=batch["input_ids"])
        return {
            "cross_entropy": (entropies.sum(), len(entropies)),
            DISTANCE: (distances.sum(), len(distances)),
            "nats_per_character": (entropies[last[completion_mask(batch)]].sum(), characters),
            f"reference/{DISTANCE}": (0.0, len(distances)),
            "reference/nats_per_character": (given.sum(), characters),
        }

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the student's cross-entropy per label, the distance per pair, and the teacher's cross-entropy."""
        theirs, counted = batch["teacher"], completion_mask(batch)
        read = completion_mask(theirs)
        # The teacher first: the student's graph is not there yet.
        teacher = counted_logits(self.models[self.teacher], theirs, read).detach()
        student = counted_logits(self.models[self.student], batch, counted)
        distances = universal_logit_distance(
            # Rows of a head that are no token are cut.
            student[batch["paired"][counted], : self.sizes[0]],
            teacher[theirs["paired"][read], : self.sizes[1]],
            temperature=self.temperature,
        )
        return (
            cross_entropy(student, next_tokens(batch, counted)),
            distances,
            cross_entropy(teacher, next_tokens(theirs, read)),
        )


def _mask(exchanges: Sequence[Exchange], lengths: Sequence[int], *, like: Tensor) -> Tensor:
    return answer_mask([exchange.column for exchange in exchanges], lengths, like=like)


def _count_characters(tokenizer: PreTrainedTokenizerBase, exchanges: Sequence[Exchange]) -> int:
    return sum(len(continuation(tokenizer, one.prompt, one.answer)) for one in exchanges)
