"""Losses per token between a student's and a teacher's logits, computed in float32 and in log space."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def forward_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns KL(teacher || student) per token, in nats, times temperature², (...).

    The factor keeps the gradient's size independent of the temperature (Hinton et al., 2015, sec. 2.1). The gradient
    is its closed form, temperature * (q - p), which is exactly zero where both agree; autograd's leaves a rest there.

    Args:
        student: Logits, (..., V), any float type.
        teacher: Logits of the same shape; carries no gradient.
        temperature: Divides both logits.
    """
    _check_shapes(student, teacher)
    with torch.no_grad():
        log_q, log_p = _log_probabilities(student, temperature), _log_probabilities(teacher, temperature)
        p = log_p.exp()
        value = _expectation(p, log_p - log_q)
        gradient = log_q.exp_().sub_(p).mul_(temperature) if student.requires_grad else None
    return _with_gradient(student, value * temperature**2, gradient=gradient)


def reverse_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns KL(student || teacher) per token, in nats, times temperature², (...); arguments as in `forward_kl`."""
    _check_shapes(student, teacher)
    with torch.no_grad():
        log_q, log_p = _log_probabilities(student, temperature), _log_probabilities(teacher, temperature)
        q, log_ratio = log_q.exp(), log_q - log_p
        value = _expectation(q, log_ratio)
        gradient = None
        if student.requires_grad:
            gradient = _zero_where_impossible(q, log_ratio.sub_(value.unsqueeze(-1)).mul_(q)).mul_(temperature)
    return _with_gradient(student, value * temperature**2, gradient=gradient)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns -log p(label) per token, in nats, (...); 0 where the label is -100."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def top1_agreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns 1.0 where both have the same most likely token, else 0.0, (...)."""
    _check_shapes(student, teacher)
    return (student.argmax(-1) == teacher.argmax(-1)).float()


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    # Before the softmax: in bfloat16 a KL of 0.005 comes out a third too large, and negative for some tokens.
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def _expectation(probabilities: Tensor, values: Tensor) -> Tensor:
    products = _zero_where_impossible(probabilities, values * probabilities)
    # Rounding makes a KL near zero negative; the gradient is computed apart, so this clamp takes nothing from it.
    return products.sum(-1).clamp_min_(0)


def _zero_where_impossible(probabilities: Tensor, values: Tensor) -> Tensor:
    """Zeroes, in place, what 0 * log 0 made NaN; a NaN probability is not zero and stays visible."""
    return values.masked_fill_(probabilities == 0, 0)


def _with_gradient(logits: Tensor, value: Tensor, *, gradient: Tensor | None) -> Tensor:
    return value if gradient is None else _KnownGradient.apply(logits, value, gradient)  # type: ignore


class _KnownGradient(torch.autograd.Function):
    """Gives values per token, (...), the gradient with respect to their logits, (..., V), that is known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.unsqueeze(-1)).to(ctx.dtype), None, None


def _check_shapes(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"student logits {tuple(student.shape)} and teacher logits {tuple(teacher.shape)} differ; "
            "cut both to the tokens they share (shared_vocabulary)"
        )
