"""On-policy distillation: a student learns what its teachers say of text that it wrote itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tasks.distill import DistillTask
from tasks.generation import (
    SERVER_PLACE,
    GenerationOptions,
    Writer,
    find_folder_problems,
    greedy,
    log_samples,
    make_writer,
    read_options,
    row_seeds,
)
from tasks.policy.health import BUT_LENGTHS, Health, read_health, warn
from tasks.teaching.quality import LENGTH_EDGES, Quality
from tasks.teaching.teachers import NEW_TEXT
from tasks.terms.schedule import parse_schedule
from tasks.text.language import completion_mask
from tasks.text.prompts import longest_prompt
from tasks.text.sequences import Exchange, decode, exchanges_of, find_packing_problem, join, pad_token
from tasks.values import collected
from trainer import LOGITS, Batch, ConfigError, Metric, StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM = 2306  # of the draws of branches, apart from all others of the same seed and step
OFF_POLICY = ("data", "teacher")
GROUP = "on_policy/"
SCORED = ("forward_kl", "reverse_kl", "top1_agreement")  # of the student's own text


class GKDTask(DistillTask):
    """Distils as `DistillTask` does, in a share of the steps on answers that the student wrote for the data's prompts.

    Generalised knowledge distillation (arXiv:2306.13649, algorithm 1): with probability lmbda a step's answers are
    drawn from the student as it is, and no gradient goes through the draws. Which steps, and which text, follow from
    the seed, the step and the example, so that every rank takes the same branch and any layout writes the same.

    Every row's last answer is written anew; what stands before it is the prompt.

    Args:
        lmbda: Share of the steps that learn from the student's own text, a number from 0 to 1, or a schedule of it.
        off_policy: Who wrote the answers of the other steps: "data", or "teacher": it writes them as the student would.
        generation: How text is drawn, see `tasks.generation`; the temperatures of the terms are another matter.
        health: What is warned of, see `tasks.policy.health`: the lengths of what the student writes; None: nothing.

    The other arguments are those of `DistillTask`.
    """

    reads_packed = False
    may_differ = (*DistillTask.may_differ, *SERVER_PLACE)

    def __init__(
        self,
        *,
        student: str = "student",
        teacher: str | Mapping[str, float] = "teacher",
        combine: str = "distributions",
        routes: Mapping[str, str] | None = None,
        keep_teachers: str = "device",
        terms: Mapping[str, Mapping[str, Any]],
        fused: bool | str = "auto",
        cache: Mapping[str, Any] | None = None,
        length_edges: Sequence[int] = LENGTH_EDGES,
        preflight: Mapping[str, bool] | None = None,
        lmbda: float | Mapping[str, Any] = 0.5,
        off_policy: str = "data",
        generation: Mapping[str, Any] | None = None,
        health: Mapping[str, Any] | None = None,
    ) -> None:
        schedule, problems = parse_schedule("task.lmbda", lmbda)
        if schedule is not None and not all(0 <= value <= 1 for value in schedule.values()):
            problems.append(f"task.lmbda is {lmbda!r}; a share of the steps is at least 0 and at most 1")
        if off_policy not in OFF_POLICY:
            problems.append(f"task.off_policy is {off_policy!r}; it must be data or teacher")
        with collected(problems):
            self.generation = read_options({} if generation is None else generation)
        with collected(problems):
            watched = read_health(health, without=BUT_LENGTHS)
        with collected(problems):
            super().__init__(
                student=student,
                teacher=teacher,
                combine=combine,
                routes=routes,
                keep_teachers=keep_teachers,
                terms=terms,
                fused=fused,
                cache=cache,
                length_edges=length_edges,
                preflight=preflight,
            )
        if not problems and off_policy == "teacher":
            problems += self._find_writing_problems()
        if problems:
            raise ConfigError(*problems)
        assert schedule is not None
        self.reads = dict.fromkeys([student, *self.weights], LOGITS)
        self.lmbda, self.off_policy = schedule, off_policy
        self.branch += f", lmbda {lmbda}, off_policy {off_policy}, generation {self.generation}"
        self.metric_labels |= {
            f"{GROUP}forward_kl": f"on its own text: {self.metric_labels['forward_kl']}",
            f"{GROUP}reverse_kl": f"on its own text: {self.metric_labels['reverse_kl']}",
            f"{GROUP}top1_agreement": "on its own text: top-1 agreement",
            f"{GROUP}teacher_cross_entropy": f"its own text to {self.reference} (nats)",
            f"{GROUP}answer_tokens": "tokens of its answers",
            f"{GROUP}ended": "answers that ended",
        }
        self.health = None if watched is None else Health(watched, prefix=f"train/{student}/")
        self._writing_seconds = 0.0
        self._steps = 0
        self._shown_at: int | None = None

    def _find_writing_problems(self) -> list[str]:
        """Returns why the teacher cannot write the answers of the off-policy steps."""
        problems = []
        if len(self.weights) > 1:
            problems.append(f"task.off_policy=teacher: task.teacher names {len(self.weights)} models; give one of them")
        if self.keep_teachers == "host":
            problems.append("task.off_policy=teacher: a teacher that writes stays where it is; drop task.keep_teachers")
        if self.cache_options.path is not None:
            problems.append("task.off_policy=teacher: no cache has what a teacher writes now; drop task.cache.path")
        return problems

    @property
    def is_ever_on_policy(self) -> bool:
        return max(self.lmbda.values()) > 0

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        problems = super().check_models(trainable, stage=stage)
        if stage in ("fit", "validate"):
            problems += find_folder_problems(self.generation.server, self.student, trainable)
        if stage != "fit" or self.cache_options.path is None:
            return problems
        if self.is_ever_on_policy and self.first not in trainable:
            problems.append(
                f"task.cache.path is given and models has no {self.first}, but the student's own text is in no cache: "
                "use task/teacher=live, whose cache serves the other steps, or task.lmbda=0"
            )
        if min(self.lmbda.values()) == 1:
            problems.append("task.cache.path is given, but with task.lmbda=1 no step reads it; drop it, or lower lmbda")
        return problems

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        problems = super().check_tokenizers(tokenizers)
        if self.student not in tokenizers:
            return problems
        own = tokenizers[self.student]
        if own is None:
            rule = "set data.tokenizer to a folder or a hub name"
            return [*problems, f"no tokenizer is known of models.{self.student}, which is to write: {rule}"]
        others = {name: tokenizers.get(name) for name in self.weights}
        return problems or [
            f"models.{self.student} and models.{name} have vocabularies that differ, and models.{name} could not read "
            "all that the student writes: use task=distill, task=distill_sequence or task=distill_unaligned"
            for name, other in others.items()
            if other is not None and other is not own and other.get_vocab() != own.get_vocab()
        ]

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        return [*super().check_batch(batch, key), *find_packing_problem(batch, key)]

    def setup(self, stage: str) -> None:
        self.asks_beside_cache = all(name in self.models for name in self.weights)
        super().setup(stage)
        if stage == "cache_teacher":
            return
        tokenizer = self.trainer.tokenizers[self.student]
        assert tokenizer is not None  # refused before
        self.tokenizer = tokenizer
        writes = stage == "fit" and (self.is_ever_on_policy or self.off_policy == "teacher")
        self.longest = longest_prompt(self.trainer.sources, trains=writes)
        self.writers = {self.student: self._writer(self.student, self.generation)}
        if self.off_policy == "teacher":
            self.writers[self.first] = self._writer(self.first, replace(self.generation, server=None))
        self.own_quality = Quality(teacher=Tensor, edges=())

    def _writer(self, name: str, options: GenerationOptions) -> Writer:
        return make_writer(
            self.models[name],
            self.tokenizer,
            options=options,
            device=self.trainer.device,
            prompt=self.longest,
            readers=[model for key, model in self.models.items() if key != name],
        )

    def is_on_policy(self, step: int) -> bool:
        """Returns whether a global step, 1-based, learns from the student's own text; the same on every rank."""
        draw = np.random.default_rng([STREAM, self.trainer.seed, step]).random()
        return bool(draw < self.lmbda.at(step))

    def prepare_batch(self, batch: Batch) -> Batch:
        step = self.trainer.global_step + 1
        is_own = self.is_on_policy(step)
        if not is_own and self.off_policy == "data":
            return batch
        seeds = row_seeds(self.trainer.seed, step, self.trainer.indices[""])
        author = self.student if is_own else self.first
        began = time.perf_counter()
        written = self._write(batch, author=author, seeds=seeds, options=self.generation)
        self._writing_seconds += time.perf_counter() - began
        if (step == 1 or step % self.trainer.log_every == 0) and step != self._shown_at:
            self._shown_at = step
            self._show(f"{author}_draws", written, data=batch, step=step)
        return written

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        output = super().training_step(batch, batch_idx)
        is_own = self.is_on_policy(self.trainer.global_step + 1)
        output.metrics[f"{self.student}/on_policy"] = (float(is_own), 1.0)
        if NEW_TEXT in batch:
            output.metrics |= {f"{self.student}/{name}": value for name, value in _text_metrics(batch).items()}
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        metrics = super().validation_step(batch, batch_idx)
        if not self.asks_beside_cache:
            return metrics
        written = self._write(batch, author=self.student, seeds=None, options=greedy(self.generation))
        if batch_idx == 0:
            self._show(f"{self.student}_answers", written, data=batch, step=self.trainer.global_step)
        found = self.measure(written, self.own_quality)
        return metrics | _on_policy(found) | {f"{GROUP}{name}": value for name, value in _text_metrics(written).items()}

    def on_train_step_end(self, metrics: dict[str, float]) -> None:
        if self.health is not None and self.is_on_policy(self.trainer.global_step):
            warn(self.health.watch(metrics, step=self.trainer.global_step), is_main=self.trainer.is_main)
        self._steps += 1
        if self.trainer.is_log_step:
            metrics["perf/generation_time"] = self._writing_seconds / self._steps
            self._writing_seconds, self._steps = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"health": None if self.health is None else self.health.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.health is not None and state.get("health") is not None:
            self.health.load_state_dict(state["health"])

    def _write(self, batch: Batch, *, author: str, seeds: Sequence[int] | None, options: GenerationOptions) -> Batch:
        """Returns the batch with answers that a model writes in the place of the data's; every rank must call it."""
        prompts = [exchange.prompt for exchange in exchanges_of(batch)]
        written = self.writers[author].write(prompts, seeds=seeds, options=options)
        answers = [self._known(answer) for answer in written.answers]
        told = [
            Exchange(prompt=prompt, answer=answer, column=len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        rollout = join(told, pad_id=pad_token(self.tokenizer), device=batch["input_ids"].device)
        if "source" in batch:
            of_rows = batch["source"].amax(-1, keepdim=True)
            rollout["source"] = torch.where(rollout["attention_mask"] != 0, of_rows, -1)
        rows = zip(prompts, answers, written.answers, written.is_ended, strict=True)
        ended = [is_ended and known == whole for prompt, known, whole, is_ended in rows if prompt]
        return rollout | {NEW_TEXT: True, "num_answers": len(ended), "num_ended": sum(ended)}

    def _known(self, answer: list[int]) -> list[int]:
        """Returns an answer up to its first token that not all models know: a row of a padded head is none."""
        if self.vocabulary is None:
            return answer
        return answer[: next((i for i, token in enumerate(answer) if token >= self.vocabulary), len(answer))]

    def _show(self, name: str, written: Batch, *, data: Batch, step: int) -> None:
        """Logs some prompts with the answers that were written and those of the data."""
        pairs = zip(exchanges_of(written), exchanges_of(data), strict=True)
        told = [(own.prompt, own.answer, given.answer) for own, given in pairs if own.answer]
        prompts, answers, others = (
            [decode(self.tokenizer, row[part], skips_special=True) for row in told] for part in range(3)
        )
        shown = {"answer of the data": others}
        log_samples(self.trainer, name, prompts=prompts, answers=answers, values=shown, step=step)


def _text_metrics(written: Batch) -> dict[str, Metric]:
    """Returns the mean length of the answers, and the share that was not cut."""
    count = written["num_answers"]
    return {"answer_tokens": (completion_mask(written).sum(), count), "ended": (float(written["num_ended"]), count)}


def _on_policy(found: Mapping[str, Metric]) -> dict[str, Metric]:
    """Returns what counts of the metrics of the student's own text: how likely it finds it itself is no quality."""
    metrics = {f"{GROUP}{name}": found[name] for name in SCORED}
    metrics |= {f"reference/{GROUP}{name}": found[f"reference/{name}"] for name in SCORED}
    return metrics | {f"{GROUP}teacher_cross_entropy": found["reference/cross_entropy"]}
