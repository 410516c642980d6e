"""A loss per token between models whose tokens have nothing to do with each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def universal_logit_distance(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns sum_i |q_(i) - p_(i)| per token, with q_(i) and p_(i) the i-th largest probabilities, (N,), in [0, 2).

    That is the Wasserstein-1 distance where moving probability between any two tokens costs the same (universal logit
    distillation, arXiv:2402.12030, sec. 3.2): it compares how sure both are, and not of what. The smaller vocabulary is
    filled up with probabilities of zero, which is what tokens have that are not there; zero *logits* would be wrong.
    There is no factor temperature²: the paper has none, and the distance is bounded at every temperature.

    Args:
        student: Logits, (N, V), any float type; computed in float32.
        teacher: Logits of the paired positions, (N, W); carries no gradient.
        temperature: Divides both logits.
    """
    if len(student) != len(teacher):
        raise ValueError(f"{len(student)} positions of the student and {len(teacher)} of the teacher; pair them first")
    q, p = _sorted_probabilities(student, temperature), _sorted_probabilities(teacher.detach(), temperature)
    width = max(q.shape[-1], p.shape[-1])
    q, p = (F.pad(side, (0, width - side.shape[-1])) for side in (q, p))
    return (q - p).abs().sum(-1)


def _sorted_probabilities(logits: Tensor, temperature: float) -> Tensor:
    # Sorted before the softmax, which keeps the order: float32 probabilities tie where the logits do not.
    return torch.softmax(logits.float().sort(dim=-1, descending=True).values / temperature, dim=-1)
