"""Losses per token between a student's and a teacher's distribution, computed in float32, with their known gradients.

Each takes logits of the student, (..., V), and of the teacher: logits of the same shape, or its `TopTokens`. Below, p
is the teacher's and q the student's distribution at the given temperature. With `top_k` (a sparse teacher always has
one), both are first reduced to the teacher's K most likely tokens and one bucket for all others, see
`tasks.losses.buckets`.

For a loss sum_v phi(q_v, p_v) and h = d phi / d q, the gradient with respect to the student's scaled logits is
q * (h - sum_v q_v h_v). It is written down here because autograd's is not zero where both agree, and needs more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.losses.buckets import top_buckets
from tasks.losses.top_tokens import TopTokens

# Added to both sides of a ratio of probabilities: 0 / 0 becomes 1, as in the limit, and no float32 above 1e-30 changes.
_TINY = torch.finfo(torch.float32).tiny


def forward_kl(
    student: Tensor, teacher: Tensor | TopTokens, *, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Returns KL(p || q), teacher against student, per token, in nats, times temperature², (...).

    The factor keeps the gradient's size independent of the temperature (Hinton et al., arXiv:1503.02531, sec. 2.1).

    Args:
        student: Logits, (..., V), any float type.
        teacher: Logits of the same shape, or the top tokens of (N, V); carries no gradient.
        temperature: Divides both logits.
        top_k: Keeps the teacher's that many most likely tokens, and the rest as one bucket; default: all tokens.
    """
    return _per_token(_forward_kl, student, teacher, temperature=temperature, top_k=top_k)


def reverse_kl(
    student: Tensor, teacher: Tensor | TopTokens, *, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Returns KL(q || p), student against teacher, per token, in nats, times temperature²; else as `forward_kl`."""
    return _per_token(_reverse_kl, student, teacher, temperature=temperature, top_k=top_k)


def generalised_jsd(
    student: Tensor,
    teacher: Tensor | TopTokens,
    *,
    temperature: float = 1.0,
    beta: float = 0.5,
    top_k: int | None = None,
) -> Tensor:
    """Returns beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, times temperature²; else as above.

    From GKD (arXiv:2306.13649, eq. 1). It is at most log 2. Near 0 it goes to beta KL(p || q), and near 1 to
    (1 - beta) KL(q || p), both 0 at the end itself; so, as in TRL, exactly 0 is the forward KL and exactly 1 the
    reverse KL, and the value jumps there.

    Args:
        beta: The teacher's weight in the mixture and in the sum, 0 to 1.
    """
    if beta in (0, 1):
        return (reverse_kl if beta else forward_kl)(student, teacher, temperature=temperature, top_k=top_k)
    return _per_token(partial(_jsd, beta=beta), student, teacher, temperature=temperature, top_k=top_k)


def skew_kl(
    student: Tensor,
    teacher: Tensor | TopTokens,
    *,
    temperature: float = 1.0,
    skew: float = 0.1,
    top_k: int | None = None,
) -> Tensor:
    """Returns KL(p || skew p + (1 - skew) q) per token, in nats, times temperature²; else as `forward_kl`.

    From DistiLLM (arXiv:2402.03898, sec. 3.1), whose alpha is `skew`. It is at most log(1 / skew).

    Args:
        skew: The teacher's share in the mixture, 0 (the forward KL) to below 1 (where it would be 0 for any student).
    """
    if skew == 0:
        return forward_kl(student, teacher, temperature=temperature, top_k=top_k)
    return _per_token(partial(_skew_kl, skew=skew), student, teacher, temperature=temperature, top_k=top_k)


def skew_reverse_kl(
    student: Tensor,
    teacher: Tensor | TopTokens,
    *,
    temperature: float = 1.0,
    skew: float = 0.1,
    top_k: int | None = None,
) -> Tensor:
    """Returns KL(q || (1 - skew) p + skew q) per token, in nats, times temperature²; else as `forward_kl`.

    From DistiLLM (arXiv:2402.03898, sec. 3.1), whose alpha is `skew`. It is at most log(1 / skew).

    Args:
        skew: The student's share in the mixture, 0 (the reverse KL) to below 1 (where it would be 0 for any student).
    """
    if skew == 0:
        return reverse_kl(student, teacher, temperature=temperature, top_k=top_k)
    return _per_token(partial(_skew_reverse_kl, skew=skew), student, teacher, temperature=temperature, top_k=top_k)


def total_variation(
    student: Tensor, teacher: Tensor | TopTokens, *, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Returns sum |p - q| / 2 per token, 0 to 1, times temperature; else as `forward_kl`.

    Its gradient falls as 1 / temperature, a divergence's as 1 / temperature²: temperature² would make it grow. Where
    p and q of a token are equal, the token's own derivative counts as 0.
    """
    return _per_token(_total_variation, student, teacher, temperature=temperature, top_k=top_k, power=1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns -log p(label) per token, in nats, (...); 0 where the label is -100."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


def entropy(logits: Tensor) -> Tensor:
    """Returns -sum p log p per token, in nats, (...)."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return -_expectation(log_p.exp(), log_p)


def top1_agreement(student: Tensor, teacher: Tensor | TopTokens) -> Tensor:
    """Returns 1.0 where both have the same most likely token, else 0.0, (...)."""
    if isinstance(teacher, TopTokens):
        likeliest = teacher.ids.gather(-1, teacher.log_probs.argmax(-1, keepdim=True)).squeeze(-1)
    else:
        _check_shapes(student, teacher)
        likeliest = teacher.argmax(-1)
    return (student.argmax(-1) == likeliest).float()


class _Parts(NamedTuple):
    """A loss per token, (...), and `factor` times `direction`, (..., V), its gradient by the scaled student logits."""

    value: Tensor
    direction: Tensor | None
    factor: float = 1.0


class _Scaled(NamedTuple):
    """What a loss starts from: both logits, the temperature that divides them, and whether a gradient is needed."""

    student: Tensor
    teacher: Tensor
    temperature: float
    is_trained: bool

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Returns log q and log p, which the caller may overwrite."""
        return self._normalised(self.student, torch.log_softmax), self._normalised(self.teacher, torch.log_softmax)

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """Returns q and p, which the caller may overwrite."""
        return self._normalised(self.student, torch.softmax), self._normalised(self.teacher, torch.softmax)

    def _normalised(self, logits: Tensor, function: Callable[..., Tensor]) -> Tensor:
        # Before the softmax: in bfloat16 a KL of 0.005 comes out a third too large, and negative for some tokens.
        if self.temperature == 1:
            return function(logits, -1, dtype=torch.float32)
        return function(logits.float() / self.temperature, -1)


def _per_token(
    loss: Callable[[_Scaled], _Parts],
    student: Tensor,
    teacher: Tensor | TopTokens,
    *,
    temperature: float,
    top_k: int | None,
    power: int = 2,
) -> Tensor:
    """Returns the loss times temperature to that power, with its gradient."""
    if isinstance(teacher, TopTokens) or top_k is not None:
        buckets = top_buckets(student, teacher, temperature=temperature, top_k=top_k)
        return _per_token(loss, *buckets, temperature=1.0, top_k=None) * temperature**power
    _check_shapes(student, teacher)
    is_trained = student.requires_grad and torch.is_grad_enabled()
    vocabulary = student.shape[-1]
    with torch.no_grad():
        rows, targets = student.reshape(-1, vocabulary), teacher.reshape(-1, vocabulary)
        value = torch.empty(len(rows), dtype=torch.float32, device=student.device)
        direction = torch.empty_like(rows, dtype=torch.float32) if is_trained else None
        factor, step = 1.0, _rows_at_once(rows)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            parts = loss(_Scaled(rows[block], targets[block], temperature, is_trained))
            value[block], factor = parts.value, parts.factor
            if direction is not None and parts.direction is not None:
                direction[block] = parts.direction
        # Rounding makes a loss near zero negative; the gradient is computed apart, so this clamp takes nothing from it.
        value = value.clamp_min_(0).mul_(temperature**power).view(student.shape[:-1])
    if direction is None:
        return value
    scale = factor * temperature ** (power - 1)
    return _KnownGradient.apply(student, value, direction.view(student.shape), scale)  # type: ignore


def _rows_at_once(logits: Tensor) -> int:
    """Returns how many rows to work on at once: a dozen passes over a piece of 1 MB stay in a core's cache.

    For 100 rows of 49,152 tokens that takes half the time of whole passes, and the memory of the passes is the piece's.
    On other devices a piece only bounds that memory; 64 MB keep them busy.
    """
    elements = 2**18 * torch.get_num_threads() if logits.device.type == "cpu" else 2**24
    return max(1, elements // logits.shape[-1])


def _forward_kl(scaled: _Scaled) -> _Parts:
    log_q, log_p = scaled.log_probabilities()
    p = log_p.exp()
    value = _expectation(p, log_p.sub_(log_q))
    return _Parts(value, log_q.exp_().sub_(p) if scaled.is_trained else None)  # h = -p / q


def _reverse_kl(scaled: _Scaled) -> _Parts:
    log_q, log_p = scaled.log_probabilities()
    q = log_q.exp()
    terms = log_q.sub_(log_p)
    value = _expectation(q, terms)
    return _Parts(value, _centred(q, terms, value) if scaled.is_trained else None)  # h = log(q / p) + 1


# A mixture bounds its ratios: q / m <= 1 / share. So a term vanishes with its own probability, and unlike for the two
# above nothing is gained by logarithms of what has underflowed.


def _jsd(scaled: _Scaled, *, beta: float) -> _Parts:
    q, p = scaled.probabilities()
    mixture = torch.lerp(q, p, beta).add_(_TINY)
    terms = _ratio(q, mixture).log_()
    of_student = _expectation(q, terms)
    of_teacher = _expectation(p, _ratio(p, mixture).log_())
    direction = _centred(q, terms, of_student) if scaled.is_trained else None
    return _Parts(beta * of_teacher + (1 - beta) * of_student, direction, 1 - beta)  # h = (1 - beta) log(q / m)


def _skew_kl(scaled: _Scaled, *, skew: float) -> _Parts:
    q, p = scaled.probabilities()
    ratio = _ratio(p, torch.lerp(q, p, skew).add_(_TINY))
    direction = None
    if scaled.is_trained:  # h = -(1 - skew) p / m; less 1, it is exactly 0 where p = q
        terms = ratio - 1
        direction = _centred(q, terms, _expectation(q, terms))
    return _Parts(_expectation(p, ratio.log_()), direction, skew - 1)


def _skew_reverse_kl(scaled: _Scaled, *, skew: float) -> _Parts:
    q, p = scaled.probabilities()
    ratio = _ratio(q, torch.lerp(p, q, skew).add_(_TINY))
    terms = ratio.log()
    if not scaled.is_trained:
        return _Parts(_expectation(q, terms), None)
    slopes = ratio.sub_(1).mul_(-skew).add_(terms)  # h = log(q / m) + 1 - skew q / m, less a constant: 0 where p = q
    return _Parts(_expectation(q, terms), _centred(q, slopes, _expectation(q, slopes)))


def _total_variation(scaled: _Scaled) -> _Parts:
    q, p = scaled.probabilities()
    difference = q - p
    value = torch.abs(difference, out=p).sum(-1) / 2
    if not scaled.is_trained:
        return _Parts(value, None)
    terms = difference.sign_()
    return _Parts(value, _centred(q, terms, _expectation(q, terms)), 0.5)  # h = sign(q - p) / 2


def _ratio(part: Tensor, mixture: Tensor) -> Tensor:
    """Returns part / mixture, to which `_TINY` has been added already; exactly 1 where both are equal."""
    return (part + _TINY).div_(mixture)


def _expectation(probabilities: Tensor, values: Tensor) -> Tensor:
    """Returns sum p v, and leaves the products p v in `values`; what has probability 0 counts 0, even if infinite."""
    total = values.mul_(probabilities).sum(-1)
    if not total.isfinite().all():  # a pass over memory that tokens without an infinity are spared
        # A NaN probability is not zero and stays visible.
        total = values.masked_fill_(probabilities == 0, 0).sum(-1)
    return total


def _centred(q: Tensor, products: Tensor, total: Tensor) -> Tensor:
    """Returns q * (h - sum q h), in place, from the products q h and their sum."""
    return products.addcmul_(q, total.unsqueeze(-1), value=-1)


class _KnownGradient(torch.autograd.Function):
    """Gives values per token, (...), the gradient with respect to their logits, (..., V), that is known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, direction: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(direction)
        ctx.factor, ctx.dtype = factor, logits.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (direction,) = ctx.saved_tensors
        return (direction * (upstream * ctx.factor).unsqueeze(-1)).to(ctx.dtype), None, None, None


def _check_shapes(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"student logits {tuple(student.shape)} and teacher logits {tuple(teacher.shape)} differ; "
            "cut both to the tokens they share (shared_vocabulary)"
        )
