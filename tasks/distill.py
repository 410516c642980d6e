"""Distillation: a student learns from a frozen teacher's distribution over the next token."""

from __future__ import annotations

import difflib
import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tasks.language import (
    BATCH_FIELDS,
    MASKS,
    common_vocabulary,
    completion_mask,
    counted_logits,
    next_tokens,
    perplexities,
)
from tasks.losses import (
    TokenLoss,
    cross_entropy,
    find_function,
    forward_kl,
    reverse_kl,
    top1_agreement,
)
from trainer import Batch, ConfigError, Metric, StepOutput, TaskModule

log = logging.getLogger(__name__)

CHANCE_MARGIN = 0.1  # nats below ln(V) that a teacher must reach to know anything


@dataclass(kw_only=True)
class Term:
    """One part of the loss: weight * the mean of `function` over the tokens of the global batch that `mask` counts."""

    function: TokenLoss
    weight: float = 1.0
    temperature: float = 1.0
    mask: str = "completion"


class DistillTask(TaskModule):
    """Trains the student on the weighted sum of terms; every term is a mean over its own tokens of the global batch.

    Args:
        student: Name of the trained model.
        teacher: Name of the frozen model.
        terms: Name of a term to any of `function` (forward_kl, reverse_kl, cross_entropy or the dotted path of a
            `TokenLoss`; default: the term's name), `weight`, `temperature` and `mask` (completion: tokens with a
            label; all: every real token). A term of weight 0 is not computed.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True

    def __init__(
        self, *, student: str = "student", teacher: str = "teacher", terms: Mapping[str, Mapping[str, Any]]
    ) -> None:
        if student == teacher:
            raise ConfigError(f"task.student and task.teacher are both {student!r}; name two models")
        self.student, self.teacher, self.reference = student, teacher, teacher
        self.metric_labels = {
            "cross_entropy": "cross-entropy (nats)",
            "forward_kl": f"KL({teacher}||{student})",
            "reverse_kl": f"KL({student}||{teacher})",
            "top1_agreement": "top-1 agreement",
        }
        self.terms = {name: term for name, term in parse_terms(terms).items() if term.weight > 0}
        self.vocabulary: int | None = None  # logits that both share; None: all, of models that are not transformers'

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        problems = [
            f"task.{role}={name}: models has no {name}, only {', '.join(trainable)}"
            for role, name in (("student", self.student), ("teacher", self.teacher))
            if name not in trainable
        ]
        if stage == "fit" and trainable.get(self.student) is False:
            problems.append(f"models.{self.student}.trainable=false, but task.student trains it; set it to true")
        if trainable.get(self.teacher):
            problems.append(f"models.{self.teacher}.trainable=true, but task.teacher is frozen; set it to false")
        return problems

    def setup(self, stage: str) -> None:
        self._check_teacher()
        models = [self.models[self.student], self.models[self.teacher]]
        self.vocabulary = common_vocabulary(models, tokenizer=self.trainer.tokenizer)

    def on_train_start(self) -> None:
        """Warns of a teacher that has nothing to teach; the first validation has just scored both models."""
        before, reference = self.trainer.before, self.trainer.reference
        if not reference or not self.trainer.is_main:
            return
        entropy, chance = reference["val/cross_entropy"], math.log(self.vocabulary or 1)
        if self.vocabulary and not entropy < chance - CHANCE_MARGIN:
            log.warning(
                "models.%s knows no more than chance: its cross-entropy is %.2f nats, a uniform guess has %.2f; "
                "check its weights, and that its tokenizer is the data's",
                self.teacher,
                entropy,
                chance,
            )
        if before.get("val/cross_entropy") == entropy and before.get("val/top1_agreement") == 1.0:
            log.warning("models.%s and models.%s predict the same; nothing to distil", self.student, self.teacher)

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        return {f"{self.student}/{name}": MASKS[term.mask](batch).sum() for name, term in self.terms.items()}

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        masks = {term.mask: MASKS[term.mask](batch) for term in self.terms.values()}
        counted = functools.reduce(torch.logical_or, masks.values())  # (B, T-1)
        student, teacher, labels = self._score(batch, counted)

        output = StepOutput()
        for name, term in self.terms.items():
            rows = masks[term.mask][counted] if len(masks) > 1 else slice(None)
            values = term.function(student[rows], teacher[rows], labels[rows], temperature=term.temperature)
            if values.shape != labels[rows].shape:
                raise ValueError(
                    f"task.terms.{name}.function returned {tuple(values.shape)}; "
                    f"it must return one loss per token, {tuple(labels[rows].shape)}"
                )
            # The sum of no token is a zero that keeps its graph, and all ranks run the same backward.
            output.sums[f"{self.student}/{name}"] = term.weight * values.sum()
            output.metrics[f"{self.student}/{name}"] = (values.detach().sum(), len(values))
        return output

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        student, teacher, labels = self._score(batch, completion_mask(batch))
        values: dict[str, Tensor | float] = {
            "cross_entropy": cross_entropy(student, labels).sum(),
            "forward_kl": forward_kl(student, teacher).sum(),
            "reverse_kl": reverse_kl(student, teacher).sum(),
            "top1_agreement": top1_agreement(student, teacher).sum(),
            "reference/cross_entropy": cross_entropy(teacher, labels).sum(),
            "reference/forward_kl": 0.0,
            "reference/reverse_kl": 0.0,
            "reference/top1_agreement": float(len(labels)),
        }
        return {name: (value, len(labels)) for name, value in values.items()}

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return perplexities(metrics)

    def _score(self, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns student and teacher logits, (N, V) in float32, and labels, (N,), of the positions that count.

        The only shift: position t, of T-1, holds the logits after token t and the label of token t+1.
        """
        # The teacher first: the student's graph is not there yet.
        teacher = counted_logits(self.models[self.teacher], batch, counted, vocabulary=self.vocabulary).detach()
        student = counted_logits(self.models[self.student], batch, counted, vocabulary=self.vocabulary)
        return student, teacher, next_tokens(batch, counted)

    def _check_teacher(self) -> None:
        if any(module.training for module in self.models[self.teacher].module.modules()):
            raise ConfigError(
                f"models.{self.teacher} is in training mode, its dropout would be noise; call eval() on it"
            )


def parse_terms(terms: Mapping[str, Mapping[str, Any]]) -> dict[str, Term]:
    """Returns the terms, or raises one ConfigError with everything that is wrong in them."""
    parsed: dict[str, Term] = {}
    problems: list[str] = []
    for name, given in terms.items():
        if not isinstance(given, Mapping):
            problems.append(f"task.terms.{name} is {given!r}; it must be a mapping such as {{weight: 1.0}}")
            continue
        term = {"function": name, **given}
        found = _term_problems(name, term)
        problems += found
        if not found:
            parsed[name] = Term(**{**term, "function": find_function(term["function"])})
    if not problems and not any(term.weight > 0 for term in parsed.values()):
        problems.append("task.terms has no term with a weight above 0; nothing would be trained")
    if problems:
        raise ConfigError(*problems)
    return parsed


def _term_problems(name: str, term: Mapping[str, Any]) -> list[str]:
    problems = []

    def check(is_right: bool, key: str, rule: str) -> None:
        if not is_right:
            problems.append(f"task.terms.{name}.{key} is {term[key]!r}; {rule}")

    keys = [field.name for field in fields(Term)]
    for key in (key for key in term if key not in keys):
        near = difflib.get_close_matches(str(key), keys, 1)
        hint = f"did you mean {near[0]}?" if near else f"a term has {', '.join(keys)}"
        problems.append(f"task.terms.{name}.{key} is no key of a term; {hint}")
    try:
        find_function(term["function"])
    except ConfigError as error:
        problems.append(f"task.terms.{name}.function: {error}")
    if "weight" in term:
        check(_is_number(term["weight"]) and term["weight"] >= 0, "weight", "it must be a number of at least 0")
    if "temperature" in term:
        is_right = _is_number(term["temperature"]) and term["temperature"] > 0
        check(is_right, "temperature", "it must be a number above 0")
        if is_right and term["function"] == "cross_entropy":
            check(term["temperature"] == 1, "temperature", "cross_entropy has none; leave it at 1")
    if "mask" in term:
        near = difflib.get_close_matches(str(term["mask"]), MASKS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        check(term["mask"] in tuple(MASKS), "mask", f"{hint}masks are {', '.join(MASKS)}")
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
