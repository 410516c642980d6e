"""One distribution out of several teachers'."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def mix_teachers(logits: Sequence[Tensor], weights: Sequence[float], *, temperature: float = 1.0) -> Tensor:
    """Returns logits z, (..., V) float32, with softmax(z / T) = sum_i w_i softmax(z_i / T), in log space.

    A mean of logits would be another thing, the normalised product of the distributions: what one teacher excludes
    would stay excluded. The mixture of two temperatures is not the temperature of a mixture, so z serves at T alone.

    Args:
        logits: Each teacher's, (..., V), any float type.
        weights: One for each, at least 0; divided by their sum.
        temperature: T.
    """
    if len(logits) != len(weights):
        raise ValueError(f"{len(logits)} teachers have {len(weights)} weights; give each one")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) == 0:
        raise ValueError(f"the teachers' weights are {list(weights)}; they must be at least 0, and one above 0")
    if len({each.shape for each in logits}) > 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in logits)
        raise ValueError(f"the teachers' logits differ: {shapes}; cut all to the tokens they share")
    mixed: Tensor | None = None
    for each, weight in zip(logits, weights, strict=True):
        if weight > 0:
            share = torch.log_softmax(each.float() / temperature, -1).add_(math.log(weight / sum(weights)))
            mixed = share if mixed is None else torch.logaddexp(mixed, share, out=mixed)
    assert mixed is not None  # a weight is above 0
    return mixed.mul_(temperature)
