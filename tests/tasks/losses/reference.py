"""The textbook definitions of the divergences, in float64, against which ours are held."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tasks.losses import forward_kl, generalised_jsd, reverse_kl, skew_kl, skew_reverse_kl, total_variation

# Name to ours; the number in a name is beta or skew in hundredths.
DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd_10": partial(generalised_jsd, beta=0.1),
    "jsd_50": generalised_jsd,
    "jsd_90": partial(generalised_jsd, beta=0.9),
    "skew_kl_10": skew_kl,
    "skew_kl_70": partial(skew_kl, skew=0.7),
    "skew_reverse_kl_10": skew_reverse_kl,
    "skew_reverse_kl_70": partial(skew_reverse_kl, skew=0.7),
    "total_variation": total_variation,
}


def random_logits(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def textbook(name: str, student: Tensor, teacher: Tensor, temperature: float, *, share: float | None = None) -> Tensor:
    """The definition, from the two distributions in float64; 0 log 0 is 0."""
    q, p = (torch.softmax(logits.double() / temperature, -1) for logits in (student, teacher))
    if share is None:
        share = int(name[-2:]) / 100 if name[-1].isdigit() else 0.0

    def kl(first: Tensor, second: Tensor) -> Tensor:
        # Both at least 1e-300: autograd has no derivative where a probability is 0.
        return (first * (first.clamp_min(1e-300) / second.clamp_min(1e-300)).log()).sum(-1)

    if name == "forward_kl":
        loss = kl(p, q)
    elif name == "reverse_kl":
        loss = kl(q, p)
    elif name.startswith("jsd"):
        mixture = share * p + (1 - share) * q
        loss = share * kl(p, mixture) + (1 - share) * kl(q, mixture)
    elif name.startswith("skew_kl"):
        loss = kl(p, share * p + (1 - share) * q)
    elif name.startswith("skew_reverse_kl"):
        loss = kl(q, (1 - share) * p + share * q)
    else:
        return (p - q).abs().sum(-1) / 2 * temperature
    return loss * temperature**2


def gradient_of(function: Callable[..., Tensor], student: Tensor, teacher: Tensor, **options: object) -> Tensor:
    student = student.clone().requires_grad_()
    function(student, teacher, **options).sum().backward()
    assert student.grad is not None
    return student.grad
