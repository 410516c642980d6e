"""Reduces two distributions to the teacher's K most likely tokens and one bucket, the tail, for all others.

Without the tail a top-k divergence rewards what it should punish: a student with 0.995 of its mass on tokens where the
teacher has 0.90 gets a forward KL of -0.09 instead of 0.21, and one that leaves them gets a negative reverse KL. With
it, the loss is a divergence of two whole distributions again, and never above that of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.losses.top_tokens import TopTokens


def top_buckets(
    student: Tensor, teacher: Tensor | TopTokens, *, temperature: float, top_k: int | None
) -> tuple[Tensor, Tensor]:
    """Returns logits of student and teacher at temperature 1 over the K tokens and the tail, twice (..., K + 1).

    Args:
        student: Logits, (..., V).
        teacher: Logits of the same shape, or the top tokens of (N, V).
        temperature: Divides the logits of all V tokens, before they are put together.
        top_k: K; for top tokens at most, and by default, as many as they are.
    """
    vocabulary = student.shape[-1]
    available = vocabulary if isinstance(teacher, Tensor) else teacher.ids.shape[-1]
    top_k = available if top_k is None else top_k
    if not 1 <= top_k <= available:
        raise ValueError(f"top_k is {top_k}; the teacher gives 1 to {available} tokens per position")
    if isinstance(teacher, TopTokens):
        if student.shape[:-1] != teacher.ids.shape[:-1]:
            raise ValueError(
                f"student logits {tuple(student.shape)} are for other tokens than the teacher's top "
                f"tokens {tuple(teacher.ids.shape)}"
            )
        ids, reduced = _of_top_tokens(teacher, temperature=temperature, top_k=top_k, vocabulary=vocabulary)
    else:
        if student.shape != teacher.shape:
            raise ValueError(f"student logits {tuple(student.shape)} and teacher logits {tuple(teacher.shape)} differ")
        ids = teacher.detach().topk(top_k, -1).indices
        reduced = _Reduced.apply(teacher.detach(), ids, temperature)  # type: ignore[no-untyped-call]
    return _Reduced.apply(student, ids, temperature), reduced  # type: ignore[no-untyped-call]


def _of_top_tokens(teacher: TopTokens, *, temperature: float, top_k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns ids, (N, K), and log-probabilities of the buckets, (N, K + 1)."""
    ids, head = teacher.ids, teacher.at(temperature)
    tail = teacher.tail_at(temperature).unsqueeze(-1)
    if ids.shape[-1] == vocabulary:
        tail = torch.full_like(tail, -torch.inf)  # no token is left
    if top_k < ids.shape[-1]:
        ordered = head.sort(-1, descending=True)
        ids, head = ids.gather(-1, ordered.indices[..., :top_k]), ordered.values[..., :top_k]
        tail = torch.cat([ordered.values[..., top_k:], tail], -1).logsumexp(-1, keepdim=True)
    return ids, torch.cat([head, tail], -1)


class _Reduced(torch.autograd.Function):
    """Turns logits, (..., V), into those of the given tokens, over temperature, and the log of the others' sum of exp.

    The tail is summed from the other tokens themselves: 1 - sum of the first is noise where the tail is small.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        shares = logits.float() / temperature
        head = shares.gather(-1, ids)
        highest = shares.scatter_(-1, ids, -torch.inf).amax(-1, keepdim=True)
        highest.masked_fill_(highest == -torch.inf, 0)  # no token is left: its share is exp(-inf) = 0
        # The logsumexp by hand, since the backward needs the same exponentials: half the time of both.
        total = shares.sub_(highest).exp_().sum(-1, keepdim=True)
        ctx.save_for_backward(shares, total, ids)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return torch.cat([head, total.log() + highest], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        shares, total, ids = ctx.saved_tensors
        upstream = upstream / ctx.temperature
        # Of an empty tail the total is 0, and so is each share in it, not 0 / 0.
        gradient = shares * (upstream[..., -1:] / total).masked_fill_(total == 0, 0)
        return gradient.scatter_(-1, ids, upstream[..., :-1]).to(ctx.dtype), None, None
