"""How sure a share is that was counted on a sample."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # of a normal distribution: 95 % lie within so many standard deviations


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Returns the lower and upper end of the 95 % interval of a share of `count` independent examples.

    E. B. Wilson's score interval (1927), which stays within 0 and 1 and is of use for few examples.
    """
    if count <= 0:
        return 0.0, 1.0
    spread = Z_95**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
