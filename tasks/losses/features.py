"""Losses between a student's and a teacher's inner states and sentence embeddings, computed in float32.

Each returns one loss per token or sentence, so that the trainer can divide by the number of them in the global batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.losses.divergences import forward_kl
from trainer import ConfigError


def hidden_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns 1/D * sum_d (s_d - t_d)² per row, (N,) (FitNets, arXiv:1412.6550; with layer maps TinyBERT, 1909.10351).

    Args:
        student: States of tokens, or embeddings of sentences, (N, D), any float type.
        teacher: Of the same shape; carries no gradient.
    """
    _check_widths(student, teacher)
    return (student.float() - teacher.detach().float()).pow(2).mean(-1)


def hidden_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns 1 - cos(s, t) per row, (N,) (DistilBERT, arXiv:1910.01108); arguments as in `hidden_mse`."""
    _check_widths(student, teacher)
    # |u - v|² / 2 of unit vectors is the same and never negative; 1 - u.v loses all digits where both agree.
    return (_unit(student) - _unit(teacher.detach())).pow(2).sum(-1) / 2


def attention_relations(student: Tensor, teacher: Tensor, *, heads: int, mask: Tensor, causal: bool = False) -> Tensor:
    """Returns the mean over relation heads of KL(teacher's relation || student's) per position, in nats, (B, T).

    The relation of head h is softmax(A_h A_h^T / sqrt(d)), A_h being the states' columns of that head and d their
    number (MiniLMv2, arXiv:2012.15828, eq. 2 to 4). The states are queries, keys or values as q_proj, k_proj and v_proj
    give them: no attention weights are needed. The heads cut the width anew, so that student and teacher may differ in
    width and in their own heads, and grouped keys and values serve as well. A position that relates to none has 0.

    Args:
        student: (B, T, D), any float type.
        teacher: (B, T, E); carries no gradient.
        heads: Relation heads, the same for both; must divide D and E.
        mask: Which positions are real, (B, T) bool; or which positions each relates to, (B, T, T) bool.
        causal: Whether a position relates to itself and earlier ones only.
    """
    for name, states in (("student", student), ("teacher", teacher)):
        if states.shape[-1] % heads:
            raise ConfigError(
                f"the {name}'s states have {states.shape[-1]} features, which {heads} relation heads do not divide; "
                f"set heads to a number that divides {student.shape[-1]} and {teacher.shape[-1]}"
            )
    allowed = mask if mask.ndim == 3 else mask.unsqueeze(-1) & mask.unsqueeze(-2)  # (B, T, T)
    allowed = allowed.tril() if causal else allowed
    is_related = allowed.any(-1)
    # A softmax over nothing is NaN, also in the gradient: such a row relates to everything and counts 0.
    excluded = ~(allowed | ~is_related.unsqueeze(-1)).unsqueeze(1)
    own = _relation_scores(student, heads).masked_fill(excluded, -torch.inf)
    others = _relation_scores(teacher.detach(), heads).masked_fill(excluded, -torch.inf)
    per_head = forward_kl(own.flatten(0, 2), others.flatten(0, 2)).view(own.shape[:3])  # (B, heads, T)
    return torch.where(is_related, per_head.mean(1), 0.0)


def similarity_mse(
    student: Tensor, teacher: Tensor, *, students: Tensor | None = None, teachers: Tensor | None = None, first: int = 0
) -> Tensor:
    """Returns 1/(M-1) * sum over j != i of (cos(s_i, s_j) - cos(t_i, t_j))² per sentence i, (N,).

    The matrices of similarities are those of Tung and Mori (arXiv:1907.09682); embeddings may differ in width.

    Args:
        student: Embeddings of this rank's sentences, (N, D), any float type.
        teacher: (N, E); carries no gradient.
        students: Those of all ranks' sentences, (M, D), by `gather_with_gradient`; None: there are no others.
        teachers: (M, E).
        first: Which of the M sentences is this rank's first.
    """
    own, others = _similarities(student, students), _similarities(teacher.detach(), teachers)
    differences = (own - others).masked_fill(_is_itself(own, first), 0)
    return differences.pow(2).sum(-1) / max(1, own.shape[-1] - 1)


def similarity_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    students: Tensor | None = None,
    teachers: Tensor | None = None,
    first: int = 0,
    temperature: float = 0.05,
) -> Tensor:
    """Returns KL(p_i || q_i) per sentence i, in nats, (N,): how differently both rank a sentence's neighbours.

    p_i = softmax over j != i of cos(t_i, t_j) / temperature, and q_i likewise of the student (SEED, arXiv:2101.04731,
    with the sentences of the batch in place of a queue). There is no factor of temperature². Arguments as in
    `similarity_mse`.

    Args:
        temperature: Divides the cosines; the smaller, the more the nearest neighbours count.
    """
    own, others = _similarities(student, students), _similarities(teacher.detach(), teachers)
    if own.shape[-1] < 2:  # no neighbours; a softmax over nothing is NaN
        return own.sum(-1) * 0
    excluded = _is_itself(own, first)
    mine, theirs = ((matrix / temperature).masked_fill(excluded, -torch.inf) for matrix in (own, others))
    return forward_kl(mine, theirs)


def _relation_scores(states: Tensor, heads: int) -> Tensor:
    """Returns A_h A_h^T / sqrt(d) of each head, (B, heads, T, T)."""
    size = states.shape[-1] // heads
    parts = states.float().view(*states.shape[:-1], heads, size).transpose(1, 2)  # (B, heads, T, d)
    return parts @ parts.transpose(-1, -2) / math.sqrt(size)


def _similarities(rows: Tensor, others: Tensor | None) -> Tensor:
    return _unit(rows) @ _unit(rows if others is None else others).T  # (N, M)


def _is_itself(similarities: Tensor, first: int) -> Tensor:
    columns = torch.arange(similarities.shape[1], device=similarities.device)
    return columns == columns[first : first + len(similarities)].unsqueeze(1)


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.float(), dim=-1)


def _check_widths(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ConfigError(
            f"the student's states are {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}; where widths "
            "differ, a learned map brings the student's to the teacher's: train one as models.projection "
            f"(model@models.projection.build=projection, student_size: {student.shape[-1]}, "
            f"teacher_size: {teacher.shape[-1]})"
        )
