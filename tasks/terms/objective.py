"""A distillation loss of one micro-batch: all terms on logits, tile by tile, and all terms on inner states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.losses import TopTokens
from tasks.losses.features import attention_relations
from tasks.terms.term import LogitsTerm, RelationsTerm, StatesTerm
from tasks.text.vocabulary import Alignment

Rows = slice | Tensor
Signals = list[tuple[float, Tensor | TopTokens]]  # teachers' logits (n, V), each with its weight in the loss


@dataclass(kw_only=True)
class LogitsObjective:
    """The weighted sum of the terms on logits, of any of the N positions that count.

    Args:
        terms: Name to term.
        scales: Name to what the term's sum is multiplied by: its weight times the trainer's.
        temperatures: Name to the term's temperature in this step.
        rows: Mask to which of the N positions it counts, (N,) bool; absent where it counts all.
        labels: The right next tokens, (N,).
        teacher: Rows and a temperature to what the teachers predict there.
        alignment: Which logits of student and teacher stand for the same token; None: all.
    """

    terms: Mapping[str, LogitsTerm]
    scales: Mapping[str, Tensor]
    temperatures: Mapping[str, float]
    rows: Mapping[str, Tensor]
    labels: Tensor
    teacher: Callable[[slice, float], Signals]
    alignment: Alignment | None = None

    def __call__(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the scaled sum, (), and each term's own sum, (terms,), of some of the positions."""
        objective, sums = logits.new_zeros(()), []
        signals: dict[float, Signals] = {}
        for name, term in self.terms.items():
            temperature = self.temperatures[name]
            if temperature not in signals:
                signals[temperature] = self.teacher(rows, temperature)
            total = self._term(name, term, logits, rows, signals[temperature]).sum()
            objective = objective + self.scales[name] * total
            sums.append(total.detach())
        return objective, torch.stack(sums)

    def _term(self, name: str, term: LogitsTerm, logits: Tensor, rows: slice, signals: Signals) -> Tensor:
        """Returns the losses of the positions that the term counts, (n,)."""
        labels, chosen = self.labels[rows], self.rows.get(term.mask)
        if chosen is not None:
            index = chosen[rows].nonzero().squeeze(-1)
            logits, labels = logits[index], labels[index]
            signals = [(weight, teacher[index]) for weight, teacher in signals]
        total = logits.new_zeros(len(labels))
        for weight, teacher in signals if term.reads_teacher else signals[:1]:
            found = aligned(self.alignment, logits, teacher, labels, temperature=self.temperatures[name])
            values = term.loss(*found, temperature=self.temperatures[name])
            if values.shape != labels.shape:
                raise ValueError(
                    f"task.terms.{name}.function returned {tuple(values.shape)}; it must return one loss per token, "
                    f"{tuple(labels.shape)}"
                )
            total = total + (weight if term.reads_teacher else 1.0) * values
        return total


def aligned(
    alignment: Alignment | None,
    student: Tensor,
    teacher: Tensor | TopTokens,
    labels: Tensor,
    *,
    temperature: float,
) -> tuple[Tensor, Tensor | TopTokens, Tensor]:
    """Returns logits of both over the same columns, for this temperature, and the labels' columns."""
    if alignment is None:
        return student, teacher, labels
    assert isinstance(teacher, Tensor), "a cache is of the student's own tokens"
    return *alignment.apply(student, teacher, temperature=temperature), alignment.column_of(labels)


def compare_states(term: StatesTerm, student: Sequence[Tensor], teacher: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Returns the mean over pairs of layers of a term's losses at the positions that count, (N,).

    Args:
        student: States of each layer, (B, T, D), after the projection if there is one.
        teacher: Those of the layer that each learns from.
        counted: (B, T-1) bool.
    """
    pairs = zip(student, teacher, strict=True)
    return torch.stack([term.loss(mine[:, :-1][counted], theirs[:, :-1][counted]) for mine, theirs in pairs]).mean(0)


def compare_relations(
    term: RelationsTerm, student: Sequence[Tensor], teacher: Sequence[Tensor], counted: Tensor, allowed: Tensor
) -> Tensor:
    """Returns the mean over pairs of layers of a term's losses at the positions that count, (N,).

    Args:
        allowed: Which positions each may attend to, (B, T, T) bool.
    """
    pairs = zip(student, teacher, strict=True)
    values = [attention_relations(mine, theirs, heads=term.heads, mask=allowed) for mine, theirs in pairs]
    return torch.stack([value[:, :-1][counted] for value in values]).mean(0)
