"""Digests of weights, the same for any sharding: whether they are those of another run, or of an earlier moment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.handle import ModelHandle, is_sharded, own_share

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRETCH = 1 << 22  # elements that are looked at together: what is counted takes eight bytes each


def digest_fixed(model: ModelHandle) -> str | None:
    """Returns a digest of all weights of a model that are not trained, None without one; all ranks call it.

    It changes with any bit, and where two elements change places.
    """
    fixed = [(name, weight) for name, weight in model.module.named_parameters() if not weight.requires_grad]
    return _digest(fixed) if fixed else None


def digest_weights(model: ModelHandle) -> str:
    """Returns a digest of all weights of a model as they are now, trained or not; all ranks call it."""
    return _digest(list(model.module.named_parameters()))


def _digest(weights: Sequence[tuple[str, nn.Parameter]]) -> str:
    table = distributed.sum_over_ranks(torch.stack([_sums_of(weight) for _, weight in weights])).tolist()
    text = json.dumps([[name, *sums] for (name, _), sums in zip(weights, table, strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()


def _sums_of(weight: nn.Parameter) -> Tensor:
    """Returns this rank's part of a weight's sums, (2,); of a weight that all ranks hold, rank 0's part is all."""
    if is_sharded(weight):
        start, share = own_share(weight)
        return _sums(share, start).to(weight.device)
    if distributed.is_main():
        return _sums(weight.data.reshape(-1), 0)
    return torch.zeros(2, dtype=torch.int64, device=weight.device)


def _sums(values: Tensor, start: int) -> Tensor:
    """Returns the sum of all elements' bits, and of each times its odd place, modulo 2^64, (2,)."""
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    bits = values.detach().view(_INTEGERS[values.element_size()])
    for first in range(0, len(bits), _STRETCH):
        stretch = bits[first : first + _STRETCH].to(torch.int64)
        places = torch.arange(start + first, start + first + len(stretch), device=values.device) * 2 + 1
        total += torch.stack([stretch.sum(), (stretch * places).sum()])
    return total
