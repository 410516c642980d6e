"""Distillation: a student learns from what frozen teachers predict, and from their inner states."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.logits.fused import TileLoss, fused_loss
from tasks.logits.heads import Head, HeadTaps, tap_heads
from tasks.losses import TopTokens
from tasks.roles import find_member_problems
from tasks.teacher_cache import (
    Reading,
    TeacherCache,
    find_cache_problems,
    find_recording_problems,
    open_checked,
    parse_options,
    record,
)
from tasks.teaching.preflight import Preflight, Subject
from tasks.teaching.quality import LENGTH_EDGES, Quality, derive_quality, find_edge_problems
from tasks.teaching.routes import Routes
from tasks.teaching.teachers import CachedTeacher, LiveTeacher, Teacher, Teachers, parse_teachers
from tasks.terms.inner_states import InnerStates
from tasks.terms.objective import LogitsObjective, aligned
from tasks.terms.term import AnyTerm, LogitsTerm, parse_terms
from tasks.text.language import (
    BATCH_FIELDS,
    MASKS,
    completion_mask,
    counted_logits,
    next_tokens,
)
from tasks.text.vocabulary import find_alignment_problems, share_vocabulary
from tasks.values import collected, find_role_problems
from trainer import Batch, ConfigError, Metric, ModelHandle, StepOutput, TaskModule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PLACES = ("device", "host")


class DistillTask(TaskModule):
    """Trains the student on the weighted sum of terms; every term is a mean over its own tokens of the global batch.

    Args:
        student: Name of the trained model.
        teacher: Name of the frozen model, or of several, each with its weight.
        combine: How several teach, see `Teachers`.
        routes: With combine=routes: source of an example to its teacher; "*" for all others.
        keep_teachers: "device", or "host": a replicated teacher's weights are on the device only while it is asked.
        terms: Name of a term to its function (default: the term's name), `weight`, `mask` and what the function takes,
            see `tasks.terms.term`. A term of weight 0 is not computed.
        fused: Whether logits are made tile by tile from the hidden states: true, false, or "auto": where the heads of
            all models allow it.
        cache: Options of the teacher cache; with a path, training reads it.
        length_edges: Completions of up to so many tokens are scored as a group.
        preflight: Name of a check before step 1 to whether it runs; those that are not named do.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True
    may_differ: Sequence[str] = ("keep_teachers", "preflight")
    modes = (*TaskModule.modes, "cache_teacher")
    gap_metrics = MappingProxyType(
        {"forward_kl": "min", "reverse_kl": "min", "cross_entropy": "min", "top1_agreement": "max"}
    )

    asks_beside_cache = False  # whether a teacher is asked where a cache is read too: about text that is in none

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
    ) -> None:
        problems = find_role_problems({"student": student}) + find_edge_problems("task.length_edges", length_edges)
        with collected(problems):
            self.weights = parse_teachers(teacher, combine=combine, routes=routes)
        with collected(problems):
            self.terms: dict[str, AnyTerm] = parse_terms(terms)
        with collected(problems):
            self.cache_options = parse_options(cache)
        with collected(problems):
            self.preflight = Preflight(preflight)
        if not (fused == "auto" or isinstance(fused, bool)):  # 1 == True
            problems.append(f"task.fused is {fused!r}; it must be auto, true or false")
        if keep_teachers not in PLACES:
            problems.append(f"task.keep_teachers is {keep_teachers!r}; it must be device or host")
        if not problems and combine == "routes" and any(not isinstance(t, LogitsTerm) for t in self.terms.values()):
            problems.append("task.combine=routes serves terms on logits only; drop those on inner states")
        if not problems and student in self.weights:
            problems.append(f"task.student and task.teacher are both {student!r}; name two models")
        if problems:
            raise ConfigError(*problems)
        self.student, self.combine, self.fused = student, combine, fused
        self.routes = Routes(routes, teachers=list(self.weights)) if routes else None
        self.branch = f"terms {dict(terms)}, teachers {self.weights}, {combine}, routes {routes}, fused {fused}"
        self.keep_teachers, self.length_edges = keep_teachers, tuple(length_edges)
        self.logits_terms = {name: term for name, term in self.terms.items() if isinstance(term, LogitsTerm)}
        self.inner = InnerStates({n: term for n, term in self.terms.items() if not isinstance(term, LogitsTerm)})
        self.one_loss = [student, *self.inner.projections]
        self.loss_key = "joint" if self.inner.projections else student  # a projection is trained by the same loss
        self.reference = self.first = next(iter(self.weights))
        self.own_tokens = list(self.weights)  # a teacher may have some tokens that the student lacks
        self.metric_labels: dict[str, str] = {
            "cross_entropy": "cross-entropy (nats)",
            "forward_kl": f"KL({self.reference}||{student})",
            "reverse_kl": f"KL({student}||{self.reference})",
            "top1_agreement": "top-1 agreement",
            "ece": "calibration error",
        }

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.weights] if mode == "cache_teacher" else list(names)

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        records = stage == "cache_teacher"
        reads_cache = self.cache_options.path is not None and not records
        trained = [] if records else [("student", self.student), *(("terms", name) for name in self.inner.projections)]
        frozen = [("teacher", name) for name in self.weights if not reads_cache or name in trainable]
        problems = find_member_problems(trainable, trained=trained, frozen=frozen, stage=stage)
        if records and self.cache_options.path is None:
            problems.append(
                "task.cache.path is missing: mode=cache_teacher writes there; give task.cache.path=<folder>"
            )
        if records:
            problems += find_recording_problems(self.cache_options, teacher=self.first)
        if records and len(self.weights) > 1:
            problems.append(
                f"task.teacher names {len(self.weights)} models; a cache is of one: give task.teacher=<name>"
            )
        return problems + (self._cache_problems() if reads_cache else [])

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        problems = (
            find_alignment_problems(tokenizers, student=self.student, teacher=name)
            for name in self.weights
            if name in tokenizers
        )
        return [problem for found in problems for problem in found]

    def _cache_problems(self) -> list[str]:
        problems = find_cache_problems(self.cache_options, self._readings())
        if len(self.weights) > 1:
            problems.append(
                f"task.cache.path is given, but task.teacher names {len(self.weights)} models; a cache is of one"
            )
        if self.routes is not None:
            problems.append("task.cache.path is given, but task.combine=routes needs live teachers; drop one of them")
        for name, term in self.terms.items():
            if not isinstance(term, LogitsTerm):
                problems.append(f"task.terms.{name} compares inner states, which a cache does not hold; drop the term")
            elif not term.temperature.is_constant:
                problems.append(f"task.terms.{name}.temperature changes, and a cache has few; give a number")
            elif not term.takes_top_tokens:
                problems.append(
                    f"task.terms.{name}.function is {term.function}, and only the functions of "
                    "tasks.losses are known to read the top tokens of a cache; take one of them, or a live teacher"
                )
        return problems

    def _readings(self) -> dict[str, Reading]:
        """Returns what each term needs of a recorded teacher."""
        return {
            name: Reading(
                mask=term.mask,
                temperature=term.temperature.start if term.reads_teacher else None,
                top_k=term.top_k,
            )
            for name, term in self.logits_terms.items()
        }

    def setup(self, stage: str) -> None:
        live = [self.models[name] for name in self.weights if name in self.models]
        for model in live:
            if any(module.training for module in model.module.modules()):
                raise ConfigError(
                    f"models.{model.name} is in training mode, its dropout would be noise; call eval() on it"
                )
        models = [self.models[self.student], *live] if self.student in self.models else live
        self.vocabulary, self.alignment = share_vocabulary(models, self.trainer.tokenizers)
        if stage == "cache_teacher":
            return
        cache = self._open_cache(live)
        self._check(live)
        self.taps = self._tap_heads(models if cache is None or self.asks_beside_cache else models[:1])
        if self.inner.terms:
            student, teacher = (self.taps.get(self.models[name]) for name in (self.student, self.first))
            assert student is not None and teacher is not None  # or it was refused
            self.inner.check(student, teacher, self.models, self.trainer.device)
        self.teachers = Teachers(
            members=self._members(cache),
            weights=self.weights,
            combine=self.combine,
        )
        loaders = (self.trainer.train_loader, self.trainer.validation_loader)
        self.row_sources, self.validation_row_sources = (
            [] if loader is None else list(loader.row_sources) for loader in loaders
        )
        if self.routes is not None:
            self.routes.check(self.row_sources, self.validation_row_sources)
        names, places = ([], []) if loaders[1] is None else loaders[1].source_groups
        kind = Tensor if cache is None else TopTokens
        self.reference_name = None if cache is None else cache.key.teacher
        self.quality = Quality(teacher=kind, sources=names, places=places, edges=self.length_edges)

    def _check(self, live: Sequence[ModelHandle]) -> None:
        """Refuses what only the models tell."""
        problems = []
        for name, term in self.logits_terms.items():
            if self.alignment is not None and self.alignment.is_one_sided and term.function == "reverse_kl":
                problems.append(
                    f"task.terms.{name}: models.{self.student} has tokens that models.{self.first} lacks, and "
                    "KL(student || teacher) is infinite; use forward_kl, or generalised_jsd"
                )
        for model in live:
            if self.keep_teachers == "host" and model.stage is not None:
                problems.append(
                    f"task.keep_teachers=host, but models.{model.name} is sharded; use "
                    f"plugin@models.{model.name}.plugin=replicate, or leave its weights to offload_param"
                )
        for name, term in self.logits_terms.items():
            if term.top_k is not None and self.vocabulary is not None and term.top_k > self.vocabulary:
                problems.append(f"task.terms.{name}.top_k={term.top_k}: the models share {self.vocabulary} tokens")
        if problems:
            raise ConfigError(*problems)
        if self.inner.terms:
            self.inner.find_modules(self.models[self.student], self.models[self.first])

    def _tap_heads(self, models: Sequence[ModelHandle]) -> HeadTaps:
        """Returns where the heads of models are read; none where all logits are built at once."""
        self.is_fused = self.fused is not False
        if not self.is_fused and not self.inner.terms:
            return HeadTaps()
        taps, problems = tap_heads(models, vocabulary=self.vocabulary, device=self.trainer.device)
        if problems and self.fused is True:
            raise ConfigError(*(f"task.fused=true, but {problem}; set task.fused=auto" for problem in problems))
        if problems and self.inner.terms:
            raise ConfigError(*(f"task.terms read inner states, but {problem}" for problem in problems))
        if problems:
            log.info("the logits of all tokens are built at once: %s", "; ".join(problems))
        return taps

    def _open_cache(self, live: Sequence[ModelHandle]) -> TeacherCache | None:
        if self.cache_options.path is None:
            return None
        teacher = live[0] if live else None
        cache = open_checked(self.trainer, self.cache_options, terms=self._readings(), teacher=teacher)
        self.vocabulary = cache.check_vocabulary(self.vocabulary)
        for name in ("forward_kl", "reverse_kl"):  # all other tokens count as one
            self.metric_labels[name] = f"{self.metric_labels[name]}, at least"
        return cache

    def _members(self, cache: TeacherCache | None) -> Mapping[str, Teacher]:
        if cache is None:
            return self._live_teachers()
        others = self._live_teachers()[self.first] if self.asks_beside_cache else None
        return {self.first: CachedTeacher(cache, others=others)}

    def _live_teachers(self) -> dict[str, LiveTeacher]:
        visits = self.trainer.device if self.keep_teachers == "host" else None
        return {
            name: LiveTeacher(
                self.models[name],
                tap=self.taps.get(self.models[name]),
                vocabulary=self.vocabulary,
                alignment=self.alignment,
                visits=visits,
            )
            for name in self.weights
        }

    def cache_teacher(self) -> None:
        record(self.trainer, self.models[self.first], self.cache_options, vocabulary=self.vocabulary)

    def on_fit_start(self) -> None:
        """Looks for what is wrong although it would run, before the first validation."""
        self.preflight.run(
            Subject(
                task=self,
                student=self.student,
                # One of other token ids is not asked: what is checked are scores of the data's.
                teachers=[n for n in self.weights if n in self.models] if self.alignment is None else [],
                masks={term.mask: MASKS[term.mask] for term in self.terms.values()},
                vocabulary=self.vocabulary,
                tokenizers=self.trainer.tokenizers,
                branch=self.branch,
            )
        )

    def on_before_backward(self, name: str, loss: Tensor) -> None:
        self.preflight.on_before_backward(self, name=name, loss=loss)

    def on_before_optimizer_step(self, name: str) -> None:
        self.preflight.on_before_optimizer_step(self, name=name)

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        return {f"{self.student}/{name}": MASKS[term.mask](batch).sum() for name, term in self.terms.items()}

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        step = self.trainer.global_step + 1
        masks = {term.mask: MASKS[term.mask](batch) for term in self.terms.values()}
        counted = functools.reduce(torch.logical_or, masks.values())  # (B, T-1)
        scales = {
            name: term.weight.at(step) * self.trainer.loss_weight(f"{self.student}/{name}")
            for name, term in self.terms.items()
        }
        owners = self._owners(batch, self.row_sources)
        with self.teachers.read(batch, counted, paths=self.inner.teacher_paths, owners=owners) as panel:
            objective = LogitsObjective(
                terms=self.logits_terms,
                scales=scales,
                temperatures={name: term.temperature.at(step) for name, term in self.logits_terms.items()},
                rows={name: mask[counted] for name, mask in masks.items()} if len(masks) > 1 else {},
                labels=next_tokens(batch, counted),
                teacher=panel.at,
                alignment=self.alignment,
            )
            total, sums, states = self._learn(batch, counted, objective, paths=self.inner.student_paths)
        values = dict(zip(self.logits_terms, sums, strict=True))
        for name, term in self.inner.terms.items():
            where: dict[str, Any] = {"batch": batch, "counted": masks[term.mask], "models": self.models}
            value = self.inner.compare(name, states, panel.states, **where).sum()
            total, values[name] = total + scales[name] * value, value.detach()
        metrics: dict[str, Metric] = {
            f"{self.student}/{name}": (values[name], masks[term.mask].sum()) for name, term in self.terms.items()
        }
        return StepOutput(shares={self.loss_key: total}, metrics=metrics | self._scheduled(step))

    def _scheduled(self, step: int) -> dict[str, Metric]:
        """Returns the weights and temperatures that change over the run, as they are in this step."""
        found = {f"{name}_weight": term.weight for name, term in self.terms.items()}
        found |= {f"{name}_temperature": term.temperature for name, term in self.logits_terms.items()}
        return {
            f"{self.student}/{name}": (schedule.at(step), 1.0)
            for name, schedule in found.items()
            if not schedule.is_constant
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        return self.measure(batch, self.quality)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return derive_quality(metrics)

    def measure(self, batch: Batch, quality: Quality) -> dict[str, Metric]:
        """Returns the metrics of a micro-batch of held-out examples."""
        counted = completion_mask(batch)
        labels, groups = next_tokens(batch, counted), quality.groups_of(batch, counted)
        with self.teachers.read(batch, counted, owners=self._owners(batch, self.validation_row_sources)) as panel:

            def compute(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
                found = aligned(self.alignment, logits, panel.mixture(rows), labels[rows], temperature=1.0)
                return logits.new_zeros(()), quality.sums(*found, groups[rows])

            _, sums, _ = self._learn(batch, counted, compute)
            return quality.metrics(sums) | panel.recorded()

    def _learn(
        self, batch: Batch, counted: Tensor, objective: TileLoss, *, paths: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Returns the student's objective and sums over the N positions that count, and its inner states."""
        model = self.models[self.student]
        tap = self.taps.get(model)
        if tap is None:
            logits = counted_logits(model, batch, counted, vocabulary=self.vocabulary)
            return *objective(logits, slice(0, len(logits))), {}
        sums: list[Tensor] = []

        def compute(hidden: Tensor, head: Head) -> Tensor:
            if self.is_fused:
                total, found = fused_loss(hidden, head, objective)
            else:
                total, found = objective(head.logits(hidden), slice(0, len(hidden)))
            sums.append(found)
            return total

        output = tap.run(batch, counted, compute, paths=paths)
        return output["head"], sums[0], output["hidden"]

    def _owners(self, batch: Batch, sources: Sequence[str]) -> Tensor | None:
        """Returns the number of each example's teacher, (B,); None where all teach all."""
        return None if self.routes is None else self.routes.owners(batch, sources)
