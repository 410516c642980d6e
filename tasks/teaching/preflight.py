"""Preflight: what is wrong with a distillation although it would run, found before its first update."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.text.language import all_mask, completion_mask, counted_logits, next_tokens, real_tokens
from tasks.text.tokenization import PROBE, template_difference, text_difference
from trainer import (
    Batch,
    ConfigError,
    Finding,
    GradientCheck,
    ModelHandle,
    TaskModule,
    did_you_mean,
    find_rank_differences,
    kept_random_state,
    rank_facts,
    run_checks,
    sample_windows,
    sum_over_ranks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CHECKS = ("ranks", "tokenization", "masks", "teacher_is_trained", "teacher_is_not_student", "gradients")

CHANCE_MARGIN = 0.1  # nats below ln(V) that a teacher must reach to know anything
SAME_LOG_PROBABILITY = 1e-4  # nats; two kernels of the same weights differ by less, other weights by far more
FEW_TRAINED = 0.01  # share of trained tokens that is most likely a mistake
MAX_WINDOWS = 16  # that are searched for a trained token
MAX_TOKENS, MAX_COUNTED = 256, 256  # of the sample that the models score: logits of a large vocabulary are large
MAX_TEXTS = 32  # that both tokenizers read
SHOWN_TOKENS = 96  # of the example in the log
NO_TEACHER = "not checked: no teacher in memory reads the student's token ids"

Mask = Callable[[Batch], Tensor]


@dataclass(kw_only=True)
class Subject:
    """What the checks look at.

    Args:
        teachers: Frozen models that read the student's token ids; none where the teacher is a cache.
        masks: Which positions are trained on, by name: the masks of the terms.
        vocabulary: The first so many logits, which all share; None: all.
        tokenizers: Each model's own, by name; None or absent: it brings none.
        branch: What decides the way through the task, such as its terms; all ranks must have it alike.
    """

    task: TaskModule
    student: str
    teachers: Sequence[str]
    masks: Mapping[str, Mask] = field(default_factory=lambda: {"completion": completion_mask})
    vocabulary: int | None = None
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None] = field(default_factory=dict)
    branch: str = ""


class Preflight:
    """The checks of a distillation before its first update; each has a name and can be switched off by it.

    The task calls `run` from `on_fit_start`, before the first validation, and the two others from the hooks of the same
    names: the graphs of the first step's losses say who gets a gradient. Whatever fails is one ConfigError on all
    ranks, and no weight has changed.

    Args:
        options: Name of a check to whether it runs; those that are not named do.
    """

    def __init__(self, options: Mapping[str, bool] | None = None) -> None:
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"task.preflight is {options!r}; it must be a mapping of checks to true or false, such as "
                f"{{{CHECKS[0]}: false}}; checks are {', '.join(CHECKS)}"
            )
        problems = [_option_problem(name, value) for name, value in options.items()]
        if any(problems):
            raise ConfigError(*(problem for problem in problems if problem))
        self.names = [name for name in CHECKS if options.get(name, True)]
        self._gradients: GradientCheck | None = None

    def run(self, subject: Subject) -> None:
        """Runs all checks but that of the gradients, which only the first step can tell; all ranks call it."""
        began, trainer = time.monotonic(), subject.task.trainer
        self._start, self._gradients = trainer.global_step, None
        with kept_random_state(), torch.no_grad():
            if "ranks" in self.names:  # first: the others' sums would wait for each other
                run_checks({"ranks": functools.partial(_check_ranks, subject)})
            sample = _Sample(subject)
            checks = {
                "tokenization": lambda: _check_tokenization(subject, sample),
                "masks": lambda: _check_masks(subject, sample),
                "teacher_is_trained": lambda: _check_trained(subject, sample),
                "teacher_is_not_student": lambda: _check_different(subject, sample),
            }
            run_checks({name: check for name, check in checks.items() if name in self.names})
        if "gradients" in self.names:
            self._gradients = GradientCheck(trainer.trained, trainer.frozen)
        log.info("preflight: %d checks in %.1f s", len(set(self.names) - {"gradients"}), time.monotonic() - began)

    def on_before_backward(self, task: TaskModule, *, name: str, loss: Tensor) -> None:
        """Looks at a loss of the first step."""
        if self._gradients is not None and task.trainer.global_step == self._start:
            self._gradients.before_backward(name, loss)

    def on_before_optimizer_step(self, task: TaskModule, *, name: str) -> None:
        """Judges a model before its first update; one that begins later is not looked at."""
        if self._gradients is not None and task.trainer.global_step == self._start:
            self._gradients.before_update(name)


def _option_problem(name: str, value: Any) -> str | None:
    if name not in CHECKS:
        hint = did_you_mean(str(name), CHECKS) or f"; checks are {', '.join(CHECKS)}"
        return f"task.preflight.{name} is no check{hint}"
    if not isinstance(value, bool):
        return f"task.preflight.{name} is {value!r}; it must be true or false"
    return None


class _Sample:
    """The examples that the checks look at: the next windows, up to one by which every mask has counted a token."""

    def __init__(self, subject: Subject) -> None:
        self.trained = self.real = 0
        self.windows = 0
        batches: list[Batch] = []
        self.unused = list(subject.masks)  # the masks that have counted no token
        for batches in sample_windows(subject.task.trainer, limit=MAX_WINDOWS):
            counts = torch.zeros(2 + len(subject.masks), dtype=torch.float64, device=subject.task.trainer.device)
            for batch in batches:
                masks = [
                    trained_mask(subject, batch),
                    all_mask(batch),
                    *(mask(batch) for mask in subject.masks.values()),
                ]
                counts += torch.stack([mask.sum() for mask in masks])
            trained, real, *counted = sum_over_ranks(counts).tolist()
            self.windows, self.trained, self.real = self.windows + 1, self.trained + int(trained), self.real + int(real)
            found = {name for name, count in zip(subject.masks, counted, strict=True) if count}
            self.unused = [name for name in self.unused if name not in found]
            if not self.unused:
                break
        self.batches = batches
        self._scores: dict[str, tuple[Tensor, Tensor]] = {}

    def score(self, subject: Subject, name: str) -> tuple[Tensor, Tensor]:
        """Returns a model's logits, (N, V), and the labels, (N,), in evaluation mode; every rank must call it."""
        if name not in self._scores:
            model: ModelHandle = subject.task.models[name]
            batch, counted = self.scored(subject) or _placeholder(subject)
            with model.evaluating():
                logits = counted_logits(model, batch, counted, vocabulary=subject.vocabulary)
            self._scores[name] = logits, next_tokens(batch, counted)
        return self._scores[name]

    def scored(self, subject: Subject) -> tuple[Batch, Tensor] | None:
        """Returns a part of a batch for the models to score, and which positions count, (B, T-1); None without any.

        Rows that are trained on come first; where there is none, every real token counts.
        """
        ordered = sorted(self.batches, key=lambda batch: -int(trained_mask(subject, batch).sum()))
        if not ordered:
            return None
        batch = ordered[0]
        mask = trained_mask(subject, batch)
        mask = mask if mask.any() else all_mask(batch)
        num_rows, length = batch["input_ids"].shape
        rows = mask.sum(1).argsort(descending=True, stable=True)[: max(1, MAX_TOKENS // length)]
        part = {
            key: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == num_rows else value
            for key, value in batch.items()
        }
        mask = mask[rows]
        order = mask.flatten().cumsum(0).view_as(mask)
        return part, mask & (order <= MAX_COUNTED)


def trained_mask(subject: Subject, batch: Batch) -> Tensor:
    """Returns the positions whose next token any of the masks counts, (B, T-1) bool."""
    return functools.reduce(torch.logical_or, [mask(batch) for mask in subject.masks.values()])


# --- ranks ---


def _check_ranks(subject: Subject) -> Finding:
    facts = rank_facts(subject.task.trainer) | {"branch of the task": subject.branch}
    problems = find_rank_differences(facts)
    count = subject.task.trainer.world_size
    fact = "one rank" if count == 1 else f"all {count} ranks agree on {len(facts)} facts of the run"
    return Finding(fact="" if problems else fact, problems=problems)


# --- tokenization ---


def _check_tokenization(subject: Subject, sample: _Sample) -> Finding:
    own = {name: subject.tokenizers.get(name) for name in (subject.student, *subject.teachers)}
    tokenizers = {name: tokenizer for name, tokenizer in own.items() if tokenizer is not None}
    student = tokenizers.pop(subject.student, None) or subject.task.trainer.tokenizer
    if student is None or not tokenizers:
        without = ", ".join(f"models.{name}" for name in own if subject.tokenizers.get(name) is None)
        return Finding(fact=f"not checked: no tokenizer is known of {without or 'a teacher'}")
    texts = [*_texts(student, sample), PROBE]
    finding = Finding(fact=f"{', '.join(tokenizers)} and {subject.student} give the same ids for {len(texts)} texts")
    for name, tokenizer in tokenizers.items():
        who = (f"models.{subject.student}", f"models.{name}")
        difference = next(filter(None, (text_difference(text, student, tokenizer, who) for text in texts)), None)
        if difference:
            finding.problems.append(
                f"{difference}; the student's ids mean something else to the teacher: give models of one tokenizer"
            )
        elif template := template_difference(texts[0], student, tokenizer, who):
            finding.warnings.append(f"{template}; the teacher reads chats in a form that it was not trained on")
    finding.fact = "" if finding.problems else finding.fact
    return finding


def _texts(tokenizer: PreTrainedTokenizerBase, sample: _Sample) -> list[str]:
    rows = [row for batch in sample.batches for row in zip(batch["input_ids"], real_tokens(batch), strict=True)]
    return [str(tokenizer.decode(ids[real].tolist(), skip_special_tokens=True)) for ids, real in rows[:MAX_TEXTS]]


# --- masks ---


def _check_masks(subject: Subject, sample: _Sample) -> Finding:
    names = " or ".join(subject.masks)
    if not sample.trained:
        problem = (
            f"none of the {sample.real} tokens of the first {sample.windows} steps is trained on (mask {names}); "
            "the examples need completions with labels, within data.block_size"
        )
        return Finding(problems=[problem])
    if sample.unused:
        problems = [
            f"none of the {sample.real} tokens of the first {sample.windows} steps counts for mask {name}, and a term "
            "with it would be 0; give it another mask, or drop it"
            for name in sample.unused
        ]
        return Finding(problems=problems)
    share = sample.trained / max(1, sample.real)
    finding = Finding(fact=f"{share:.1%} of {sample.real} tokens are trained on (mask {names})")
    if share < FEW_TRAINED:
        finding.warnings.append(
            f"only {share:.2%} of the tokens are trained on (mask {names}); are prompts far longer than completions?"
        )
    shown = next(_shown_rows(subject, sample), None)
    if shown is not None:
        finding.fact += f"; between [[ and ]] in this example: {shown}"
    return finding


def _shown_rows(subject: Subject, sample: _Sample) -> Iterator[str]:
    for batch in sample.batches:
        for ids, real, mask in zip(batch["input_ids"], real_tokens(batch), trained_mask(subject, batch), strict=True):
            if mask.any():
                # position t of the mask is about token t+1; the first token is never trained on
                is_trained = F.pad(mask, (1, 0))[real].tolist()
                yield marked_text(ids[real].tolist(), is_trained, subject.task.trainer.tokenizer)


def marked_text(ids: Sequence[int], is_trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Returns an example as text, what is trained on between [[ and ]]; its ids where no tokenizer is known.

    A long one is cut to the tokens around the first that is trained on.
    """
    first = max(0, list(is_trained).index(True) - SHOWN_TOKENS // 2)
    shown = list(zip(ids, is_trained, strict=True))[first : first + SHOWN_TOKENS]
    parts = ["..."] if first else []
    for trained, run in groupby(shown, key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        text = " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens))
        parts.append(f"[[{text}]]" if trained else text)
    if first + SHOWN_TOKENS < len(ids):
        parts.append("...")
    return (" " if tokenizer is None else "").join(parts).replace("\n", "\\n")


# --- teachers ---


def _check_trained(subject: Subject, sample: _Sample) -> Finding:
    if not subject.teachers:
        return Finding(fact=NO_TEACHER)
    finding, facts = Finding(), []
    for name in subject.teachers:
        logits, labels = sample.score(subject, name)
        total = F.cross_entropy(logits, labels, reduction="sum").double()
        sums = torch.stack([total, torch.full_like(total, len(labels)), torch.full_like(total, logits.shape[-1])])
        entropy_sum, count, sizes = sum_over_ranks(sums).tolist()
        entropy, chance = entropy_sum / max(1, count), math.log(sizes / subject.task.trainer.world_size)
        said = f"cross-entropy {entropy:.2f} nats, that of a uniform guess {chance:.2f}"
        if entropy < chance - CHANCE_MARGIN:
            facts.append(f"{name}: {said}, on {int(count)} tokens")
        else:
            finding.problems.append(
                f"models.{name} knows no more than chance ({said}); check its weights, and that its tokenizer is the "
                "data's"
            )
    finding.fact = "; ".join(facts)
    return finding


def _check_different(subject: Subject, sample: _Sample) -> Finding:
    if not subject.teachers:
        return Finding(fact=NO_TEACHER)
    finding, facts = Finding(), []
    logits, labels = sample.score(subject, subject.student)
    for name in subject.teachers:
        others, _ = sample.score(subject, name)
        if logits.shape == others.shape:
            gap = (logits.log_softmax(-1) - others.log_softmax(-1)).abs().amax(-1)
            differs = ~(gap <= SAME_LOG_PROBABILITY)  # neither is a NaN
        else:
            differs = torch.ones_like(labels, dtype=torch.bool)
        counts = torch.stack([differs.sum(), torch.full_like(differs.sum(), len(labels))])
        num_different, total = sum_over_ranks(counts).tolist()
        if num_different:
            facts.append(f"{name} and {subject.student} differ on {num_different} of {total} tokens")
        else:
            finding.problems.append(
                f"models.{name} and models.{subject.student} predict the same on all {total} tokens: there is nothing "
                f"to distil; {_why_same(subject, name)}"
            )
    finding.fact = "; ".join(facts)
    return finding


def _why_same(subject: Subject, teacher: str) -> str:
    spec = subject.task.trainer.specs[subject.student]
    if spec.lora:
        return f"adapters start at zero, and the model below them is models.{teacher}'s; give a smaller one, or another"
    if spec.init_from == teacher:
        return f"drop models.{subject.student}.init_from={teacher}"
    return f"give models.{subject.student}.build or models.{teacher}.build another model"


def _placeholder(subject: Subject) -> tuple[Batch, Tensor]:
    """Returns a batch of which nothing counts: a rank without examples runs the same modules as the others."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=subject.task.trainer.device)
    return {"input_ids": ids, "labels": ids}, torch.zeros(1, 1, dtype=torch.bool, device=ids.device)
