"""A loss over the vocabulary from hidden states, whose logits only ever exist one tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.logits.heads import Head, wide

# (logits of a tile (n, V), which want a gradient; its rows) -> (objective (), sums (M,) without a graph)
TileLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]

# Logits of a tile: with fewer, the weight and its gradient pass through memory more often than the products take; below
# 32 MiB, glibc also keeps for itself what a tile leaves.
CPU_TILE, GPU_TILE = 12 * 2**20, 2**27
BLOCK = 2**22  # elements of a weight's rows that are copied to another data type at a time


def fused_loss(hidden: Tensor, head: Head, loss: TileLoss, *, tile_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns a loss of the logits of hidden states, and sums beside it, without ever holding all logits.

    The gradient is computed in the forward, tile by tile, and only multiplied in the backward: no logit is computed
    twice. A tile is some rows times the whole vocabulary, since a softmax needs all of a row and cutting it too would
    need a second product; of a larger vocabulary it has fewer rows. So memory is that of one tile, whatever N and V.
    Gradients of the weights are added up in float32, whatever the head's data type.

    Args:
        hidden: (N, H). Of no row comes a zero that keeps its graph.
        head: Its weight may be frozen, and so may be what the hidden states come from.
        loss: Of one tile, a sum over its rows. It may want gradients of the logits only.
        tile_rows: Of one tile; None: what suits the device.

    Returns:
        The sum of all objectives, (), and the sum of all sums, (M,), without a graph.
    """
    num_rows = tile_rows or default_rows(hidden.device, head.num_logits)
    found: tuple[Tensor, Tensor] = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head, loss, num_rows, torch.is_grad_enabled()
    )
    return found


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        loss: TileLoss,
        num_rows: int,
        has_graph: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden, head = hidden.detach(), head.detached()
        dtype = product_dtype(hidden)
        hidden, head = hidden.to(dtype), head.to(dtype)
        gradients = Gradients(hidden, head, wanted=[has_graph and wanted for wanted in ctx.needs_input_grad[:3]])
        totals: list[Tensor] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in parts(len(hidden), num_rows):
                *found, gradient = _run_tile(hidden, head, loss, rows, has_graph=gradients.are_wanted)
                if gradient is not None:
                    gradients.add(rows, gradient)
                del gradient
                # In place: a small tensor of each tile that stays would split the memory that the next tile needs.
                for total, value in zip(totals, found, strict=bool(totals)):
                    total.add_(value)
                totals = totals or [value.clone() for value in found]
        ctx.gradients = gradients
        objective, sums = totals
        ctx.mark_non_differentiable(sums)
        return objective, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a fused loss holds its gradients for one backward"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*gradients.times(upstream), None, None, None, None)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Returns what the head's product is computed in, as the model computes it; all else is float32 at least."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def default_rows(device: torch.device, num_logits: int) -> int:
    """Returns the rows of a tile that suit a device, of so many logits each."""
    return max(1, (CPU_TILE if device.type == "cpu" else GPU_TILE) // num_logits)


def _run_tile(
    hidden: Tensor, head: Head, loss: TileLoss, rows: slice, *, has_graph: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns a tile's objective, its sums, and the gradient of the head's product x W^T + b, (n, V)."""
    logits = head.logits(hidden[rows])
    with torch.set_grad_enabled(has_graph):
        objective, sums = loss(logits.requires_grad_(has_graph), rows)
    gradient = None
    if objective.requires_grad:
        (gradient,) = torch.autograd.grad(objective, logits)
        gradient = head.gradient_of_product(gradient, logits.detach())
    return objective.detach(), sums.detach(), gradient


class Gradients:
    """The gradients of hidden states, weight and bias, in float32 at least, as far as they are wanted.

    Args:
        wanted: Of each of the three, whether it is.
    """

    def __init__(self, hidden: Tensor, head: Head, *, wanted: Sequence[bool]) -> None:
        self.hidden, self.head, self.are_wanted = hidden, head, any(wanted)
        values = (hidden, head.weight, head.bias)
        self.totals = [
            torch.zeros_like(value, dtype=wide(value.dtype)) if is_wanted and value is not None else None
            for value, is_wanted in zip(values, wanted, strict=True)
        ]

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Adds what one tile gives; gradient: of the product x W^T + b, (n, V)."""
        of_hidden, of_weight, of_bias = self.totals
        num_logits = self.head.num_logits
        if of_hidden is not None:
            _add_product(of_hidden[rows], gradient, self.head.weight[:num_logits])
        if of_weight is not None:
            _add_outer(of_weight[:num_logits], gradient, self.hidden[rows])
        if of_bias is not None:
            of_bias[:num_logits].add_(gradient.sum(0))

    def times(self, upstream: Tensor) -> list[Tensor | None]:
        return [None if total is None else total.mul_(upstream) for total in self.totals]


def _add_product(total: Tensor, gradient: Tensor, weight: Tensor) -> None:
    """Adds G W to a total in float32; G (n, V) in float32, W (V, H)."""
    if weight.dtype == torch.bfloat16:
        total.add_(gradient.to(weight.dtype) @ weight)  # the product adds up in float32 itself
    elif weight.dtype == total.dtype:
        total.addmm_(gradient, weight)
    else:  # float16 has no room for a gradient before the loss scale multiplies it
        for block in parts(len(weight), BLOCK // weight.shape[1]):
            total.addmm_(gradient[:, block], weight[block].to(total.dtype))


def _add_outer(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Adds G^T X to a total in float32, with no second matrix of its size; G (n, V) in float32, X (n, H)."""
    if hidden.dtype != torch.bfloat16 or hidden.device.type == "cpu":
        total.addmm_(gradient.T, hidden.to(total.dtype))
        return
    gradient = gradient.to(hidden.dtype)  # on a GPU products in float32 take many times as long
    for block in parts(len(total), BLOCK // total.shape[1]):
        total[block].add_(gradient[:, block].T @ hidden)


def parts(count: int, size: int) -> Iterator[slice]:
    """Yields slices of at most so many; of nothing one empty slice, so that a loss of no row keeps its shapes."""
    size = max(1, size)
    for start in range(0, max(1, count), size):
        yield slice(start, min(start + size, count))
