"""Learned maps from a student's width to its teacher's: a third trained model, with a plugin of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer import ConfigError


class Projection(nn.Module):
    """One linear map for each place where the student's states are compared with the teacher's.

    It is needed while the student learns and not afterwards (FitNets, arXiv:1412.6550; TinyBERT, arXiv:1909.10351).

    Args:
        student_size: Features of the student's states.
        teacher_size: Features of the teacher's.
        count: Number of places.
    """

    def __init__(self, *, student_size: int, teacher_size: int, count: int = 1) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_Map(student_size, teacher_size) for _ in range(count))

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Returns the states of each place, (..., student_size), as (..., teacher_size)."""
        if len(states) != len(self.maps):
            raise ConfigError(
                f"the projection has {len(self.maps)} maps, but states of {len(states)} places come to it; "
                f"set models.<projection>.build.count={len(states)}"
            )
        return [_apply(linear, state) for linear, state in zip(self.maps, states, strict=True)]


def projection(*, student_size: int, teacher_size: int, count: int = 1) -> Projection:
    """Returns a `Projection`; for `models.<name>.build`."""
    sizes = {"student_size": student_size, "teacher_size": teacher_size, "count": count}
    problems = [f"build.{name}={value}: must be at least 1" for name, value in sizes.items() if value < 1]
    if problems:
        raise ConfigError(*problems)
    return Projection(student_size=student_size, teacher_size=teacher_size, count=count)


class _Map(nn.Linear):
    """A linear map that starts with orthonormal rows or columns: it keeps lengths and angles as far as widths allow."""

    def reset_parameters(self) -> None:
        # Here, not in the Projection: ZeRO-3 shards the weight as soon as its module is made.
        start = nn.init.orthogonal_(torch.empty(self.weight.shape, dtype=torch.float32))  # no QR in half precision
        with torch.no_grad():
            self.weight.copy_(start)
            self.bias.zero_()


def _apply(linear: nn.Module, state: Tensor) -> Tensor:
    size, width = linear.in_features, state.shape[-1]
    if width != size:
        raise ConfigError(
            f"the projection takes states of {size} features, the student's have {width}; "
            f"set models.<projection>.build.student_size={width}"
        )
    projected: Tensor = linear(state.to(linear.weight.dtype))  # type: ignore[arg-type]
    return projected
