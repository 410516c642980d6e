"""The terms of a loss on inner states: what they need of both models, their values, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.logits.heads import HeadTap, sample_batch
from tasks.logits.taps import base_model, find_module
from tasks.projection import Projection
from tasks.terms.objective import compare_relations, compare_states
from tasks.terms.term import RelationsTerm, StatesTerm
from tasks.text.language import attention_pairs
from trainer import Batch, ConfigError, ModelHandle

States = Mapping[str, Tensor]  # module path to what it returned, (B, T, D)


class InnerStates:
    """The terms on inner states.

    Args:
        terms: Name to term.
    """

    def __init__(self, terms: Mapping[str, StatesTerm | RelationsTerm]) -> None:
        self.terms = terms
        self.projections = sorted(
            {t.projection for t in terms.values() if isinstance(t, StatesTerm) and t.projection is not None}
        )
        layers = [pair for term in terms.values() for pair in term.layers.items()]
        self.student_paths = list(dict.fromkeys(mine for mine, _ in layers))
        self.teacher_paths = list(dict.fromkeys(theirs for _, theirs in layers))

    def compare(
        self,
        name: str,
        student: States,
        teacher: States,
        *,
        batch: Batch,
        counted: Tensor,
        models: Mapping[str, ModelHandle],
    ) -> Tensor:
        """Returns the losses of a term at the positions that count, (N,).

        Args:
            counted: (B, T-1) bool.
            models: Among them the projections.
        """
        term = self.terms[name]
        mine = [student[path] for path in term.layers]
        theirs = [teacher[path] for path in term.layers.values()]
        if isinstance(term, RelationsTerm):
            return compare_relations(term, mine, theirs, counted, attention_pairs(batch))
        if term.projection is not None:
            mine = models[term.projection](mine)
        return compare_states(term, mine, theirs, counted)

    @torch.no_grad()
    def check(
        self, student: HeadTap, teacher: HeadTap, models: Mapping[str, ModelHandle], device: torch.device
    ) -> None:
        """Raises ConfigError for states that cannot be compared, tried on a few tokens; every rank must call it."""
        problems = [
            f"models.{name} is no projection: choose model@models.{name}.build=projection, or name another model"
            for name in self.projections
            if not isinstance(base_model(models[name].module), Projection)
        ]
        if problems:
            raise ConfigError(*problems)
        batch, counted = sample_batch(device)
        mine, theirs = (
            tap.run(batch, counted, lambda hidden, head: hidden, paths)["hidden"]
            for tap, paths in ((student, self.student_paths), (teacher, self.teacher_paths))
        )
        for name in self.terms:
            try:
                self.compare(name, mine, theirs, batch=batch, counted=counted, models=models)
            except ConfigError as error:
                problems += [f"task.terms.{name}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(*problems)

    def find_modules(self, student: ModelHandle, teacher: ModelHandle) -> None:
        """Raises ConfigError for a path that leads nowhere."""
        for model, paths in ((student, self.student_paths), (teacher, self.teacher_paths)):
            for path in paths:
                find_module(model, path)
