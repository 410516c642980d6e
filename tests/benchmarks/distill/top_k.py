"""Two ways to use a teacher's K most likely tokens that go wrong, as functions that a term may name by their path."""

from __future__ import annotations

from torch import Tensor

K = 8


def truncated(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Returns sum over the top K of p (log p - log q), (N,): below 0 where the student has more mass there.

    Its minimum is a student with no mass outside the top K.
    """
    log_q, log_p = _top(student, teacher, temperature)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def renormalised(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Returns KL(p || q) of both, renormalised over the top K, (N,): 0 whatever the student gives to all others."""
    log_q, log_p = (values.log_softmax(-1) for values in _top(student, teacher, temperature))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _top(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities (N, K), normalised over the whole vocabulary, of the teacher's top K."""
    log_p, ids = (teacher / temperature).log_softmax(-1).topk(K)
    return (student / temperature).log_softmax(-1).gather(-1, ids), log_p
