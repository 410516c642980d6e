"""Learning-rate schedules: a linear warm-up, then a curve from the peak rate down to a share of it.

Each returns a LambdaLR that multiplies the optimizer's own rate; step it once after every update. With w warm-up
updates of n in all, update k = 1, 2, ... runs at this share of the peak rate:

    k <= w:  k / w, so that the first update is not lost to a rate of zero
    k > w:   min_ratio + (1 - min_ratio) * curve(x) with x = (k - 1 - w) / (n - w), from the peak at k = w + 1

Update n + 1 would be the first at min_ratio, so the last one is near it and not lost either; later ones stay there.
A warm-up longer than the run is legal: the run then ends within it, and warns of it at its start.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, *, total_steps: int, warmup_steps: float = 0, min_ratio: float = 0.0) -> LambdaLR:
    """Returns half a cosine: curve(x) = (1 + cos(pi x)) / 2.

    Args:
        total_steps: Updates of this optimizer in the whole run.
        warmup_steps: Updates, or a share of `total_steps` when below 1.
        min_ratio: Rate at the end, relative to the peak, in [0, 1].
    """
    return _schedule(optimizer, lambda x: (1 + math.cos(math.pi * x)) / 2, total_steps, warmup_steps, min_ratio)


def linear(optimizer: Optimizer, *, total_steps: int, warmup_steps: float = 0, min_ratio: float = 0.0) -> LambdaLR:
    """Returns a straight line: curve(x) = 1 - x; arguments as in `cosine`."""
    return _schedule(optimizer, lambda x: 1 - x, total_steps, warmup_steps, min_ratio)


def constant(optimizer: Optimizer, *, total_steps: int, warmup_steps: float = 0) -> LambdaLR:
    """Returns the peak rate after the warm-up; `total_steps` only matters to a warm-up given as a share."""
    return _schedule(optimizer, lambda x: 1.0, total_steps, warmup_steps, 0.0)


def _schedule(
    optimizer: Optimizer,
    curve: Callable[[float], float],
    total_steps: int,
    warmup_steps: float,
    min_ratio: float,
) -> LambdaLR:
    _check(total_steps, warmup_steps, min_ratio)
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)

    def factor(num_updates: int) -> float:
        if num_updates < warmup:
            return (num_updates + 1) / warmup
        progress = min(1.0, (num_updates - warmup) / max(1, total_steps - warmup))
        return min_ratio + (1 - min_ratio) * curve(progress)

    return LambdaLR(optimizer, factor)


def _check(total_steps: int, warmup_steps: float, min_ratio: float) -> None:
    if not (isinstance(total_steps, int) and total_steps >= 1):
        raise ValueError(f"total_steps must be a whole number of at least 1, not {total_steps!r}")
    if not (warmup_steps >= 0 and (warmup_steps < 1 or warmup_steps == int(warmup_steps))):
        raise ValueError(f"warmup_steps must be a whole number of updates, or a share in [0, 1), not {warmup_steps!r}")
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio must be in [0, 1], not {min_ratio!r}")
