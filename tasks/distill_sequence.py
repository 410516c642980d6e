"""Sequence-level distillation: a frozen teacher writes the answers from which a student learns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from tasks.generation import greedy, log_samples, make_writer, read_options, row_seeds
from tasks.losses import cross_entropy
from tasks.teaching.pairs import find_interpreter_problems, find_naming_problems, find_pair_problems, known_tokenizers
from tasks.text.language import BATCH_FIELDS, completion_mask, counted_logits, next_tokens, perplexities
from tasks.text.sequences import Exchange, Interpreter, decode, exchanges_of, find_packing_problem, join, pad_token
from tasks.values import collected
from trainer import Batch, ConfigError, Metric, ModelHandle, StepOutput, TaskModule, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class DistillSequenceTask(TaskModule):
    """Trains the student by cross-entropy on what the teacher writes for the prompts of the data.

    The data's own answers are only scored. Greedy text stands for the teacher's most likely one, which the paper finds
    by a beam search (Kim and Rush, arXiv:1606.07947, sec. 3.2); drawn at temperature 1, the loss is
    KL(teacher || student) over whole answers up to a constant, estimated from one answer per prompt.

    The models may have different tokenizers: then the prompt goes to the teacher as text in its own chat template, and
    its answer comes back as text. Every row's last answer is written anew; what stands before it is the prompt.

    Args:
        student: Name of the trained model.
        teacher: Name of the frozen model.
        max_new_tokens: Where an answer is cut, in the teacher's tokens.
        temperature: Of the teacher's draws in training; 0: its most likely token each time.
        top_p: The least set of tokens with so much probability is drawn from; 1: all.
    """

    batch_fields, reads_one_batch, reads_packed = BATCH_FIELDS, True, False

    def __init__(
        self,
        *,
        student: str = "student",
        teacher: str = "teacher",
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        problems = find_naming_problems(student=student, teacher=teacher)
        with collected(problems):
            self.options = read_options(
                {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}, key="task"
            )
        if problems:
            raise ConfigError(*problems)
        self.student, self.teacher, self.reference = student, teacher, teacher
        self.own_tokens = (teacher,)
        self.metric_labels = {
            "cross_entropy": "cross-entropy (nats)",
            "teacher_cross_entropy": f"cross-entropy of {teacher}'s text",
        }
        self._held_out: dict[int, tuple[Batch, Batch]] = {}  # by validation batch: what the teacher wrote for it
        self._is_shown = False

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        return find_pair_problems(trainable, student=self.student, teacher=self.teacher, stage=stage)

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        return find_interpreter_problems(tokenizers, student=self.student, teacher=self.teacher)

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        return find_packing_problem(batch, key)

    def setup(self, stage: str) -> None:
        self.source, self.target = known_tokenizers(self.trainer.tokenizers, student=self.student, teacher=self.teacher)
        teacher = self.models[self.teacher]
        self.writer = make_writer(teacher, self.target, options=self.options, device=self.trainer.device)
        self.to_teacher = Interpreter(self.source, self.target)
        self.to_student = Interpreter(self.target, self.source, ends=end_tokens(teacher.module, self.target))
        self._held_out.clear()

    def prepare_batch(self, batch: Batch) -> Batch:
        seeds = row_seeds(self.trainer.seed, self.trainer.global_step, self.trainer.indices[""])
        return self._write(batch, seeds)[0]

    def count_items(self, batch: Batch) -> Tensor:
        return completion_mask(batch).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        values = _cross_entropies(self.models[self.student], batch)
        name = f"{self.student}/cross_entropy"
        return StepOutput(
            sums={name: values.sum()},
            metrics={
                name: (values.detach().sum(), len(values)),
                f"{self.student}/answer_tokens": (len(values), len(batch["input_ids"])),
            },
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        if batch_idx not in self._held_out:
            self._held_out[batch_idx] = self._write(batch, None)
        written, as_teacher_reads = self._held_out[batch_idx]
        student, teacher = self.models[self.student], self.models[self.teacher]
        metrics: dict[str, Metric] = {
            "cross_entropy": _mean(_cross_entropies(student, batch)),
            "teacher_cross_entropy": _mean(_cross_entropies(student, written)),
        }
        if self.to_teacher.is_same:  # else the teacher's numbers are per token of another kind
            metrics["reference/cross_entropy"] = _mean(_cross_entropies(teacher, batch))
            metrics["reference/teacher_cross_entropy"] = _mean(_cross_entropies(teacher, as_teacher_reads))
        return metrics

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def _write(self, batch: Batch, seeds: Sequence[int] | None) -> tuple[Batch, Batch]:
        """Returns the batch with the teacher's answers in the place of the data's, for the student and the teacher.

        Args:
            seeds: Of the draws, one per row; None: greedy.
        """
        device = batch["input_ids"].device
        prompts = [exchange.prompt for exchange in exchanges_of(batch)]
        asked = [self.to_teacher.prompt(prompt) for prompt in prompts]
        options = self.options if seeds is not None else greedy(self.options)
        answers = self.writer.write(asked, seeds=seeds, options=options).answers
        told = [self.to_student.answer(answer, prompt=prompt) for answer, prompt in zip(answers, asked, strict=True)]
        self._show(asked, answers)
        return (
            join(_paired(prompts, told), pad_id=pad_token(self.source), device=device),
            join(_paired(asked, answers), pad_id=pad_token(self.target), device=device),
        )

    def _show(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Logs some of the first answers, once."""
        shown = [pair for pair in zip(prompts, answers, strict=True) if pair[1]]
        if self._is_shown or not shown or not self.trainer.is_main:
            return
        self._is_shown = True
        asked, written = (
            [decode(self.target, ids, skips_special=True) for ids in column] for column in zip(*shown, strict=True)
        )
        log.info("models.%s was asked %r and wrote %r", self.teacher, asked[0], written[0])
        log_samples(self.trainer, "teacher_answers", prompts=asked, answers=written)


def _paired(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Exchange]:
    return [
        Exchange(prompt=prompt, answer=answer, column=len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _cross_entropies(model: ModelHandle, batch: Batch) -> Tensor:
    counted = completion_mask(batch)
    return cross_entropy(counted_logits(model, batch, counted), next_tokens(batch, counted))


def _mean(values: Tensor) -> tuple[Tensor, int]:
    return values.sum(), len(values)
