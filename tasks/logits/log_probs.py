"""Log-probabilities of the right next tokens, with gradients, without the logits of all positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tasks.logits.fused import Gradients, default_rows, parts, product_dtype
from tasks.logits.heads import Head, HeadTap, wide
from tasks.text.language import counted_logits, next_tokens
from trainer import Batch, ModelHandle

LEAST = -1e4  # its exponential is 0 in float64 too
KEPT = 2**26  # logits that are held for the backward, 256 MiB: making them again costs a third more time


@dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """What a model says of the tokens of N positions.

    Args:
        log_probs: log p of the right next token, (N,), in float32 at least.
        entropy: Of the distribution that p is of, in nats, (N,); None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


def token_log_probs(
    model: ModelHandle,
    batch: Batch,
    counted: Tensor,
    *,
    temperature: float = 1.0,
    tap: HeadTap | None = None,
    vocabulary: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> TokenLogProbs:
    """Returns a model's log-probabilities of `next_tokens(batch, counted)`.

    Args:
        counted: Which positions do, (B, T-1) bool.
        temperature: Divides the logits.
        tap: The model's head, see `tap_heads`: logits are then made a tile of rows at a time, and but for the first
            made again in the backward. None: those of all N positions are held until the backward.
        vocabulary: The first so many logits count; None: all, or those of the tap.
        entropy: Whether it is wanted too.
        entropy_gradient: Whether it is wanted with a graph, as for an entropy bonus.
    """
    labels = next_tokens(batch, counted)
    reading = Reading(temperature=temperature, entropy=entropy or entropy_gradient, entropy_gradient=entropy_gradient)
    if tap is None:
        # A copy of what the model gave, so that the backward may write over it.
        return log_probs_of_logits(counted_logits(model, batch, counted, vocabulary=vocabulary), labels, reading)

    def compute(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        head = head if vocabulary is None else replace(head, vocabulary=vocabulary)
        return _of_hidden(hidden, head, labels, reading)

    return reading.result(tap.run(batch, counted, compute)["head"])


def row_sums(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the values of the positions that count summed by row, (B,); rows without one are 0.

    Args:
        values: (N,).
        counted: (B, T-1) bool, of which N are true.
    """
    rows = counted.nonzero()[:, 0]
    return values.new_zeros(len(counted)).index_add(0, rows, values)


def as_table(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the values of the positions that count where they stand in the batch, (B, T-1); 0 elsewhere.

    Args:
        values: (N,).
        counted: (B, T-1) bool, of which N are true.
    """
    return torch.zeros(counted.shape, dtype=values.dtype, device=values.device).masked_scatter(counted, values)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read off the logits of a token; arguments as in `token_log_probs`."""

    temperature: float = 1.0
    entropy: bool = False
    entropy_gradient: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log p, the logarithm of the normaliser, and the entropy (0 unless asked for), (n,) each.

        Args:
            logits: (n, V), of which nothing is changed.
            labels: (n,).
        """
        scaled = logits if self.temperature == 1 else logits / self.temperature
        normaliser = scaled.logsumexp(-1)
        log_probs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
        if not self.entropy:
            return log_probs, normaliser, torch.zeros_like(log_probs)
        all_log_probs = _finite(scaled - normaliser.unsqueeze(-1))
        return log_probs, normaliser, -all_log_probs.exp().mul_(all_log_probs).sum(-1)

    def backward(
        self,
        logits: Tensor,
        labels: Tensor,
        normaliser: Tensor,
        entropy: Tensor,
        of_log_probs: Tensor,
        of_entropy: Tensor,
    ) -> Tensor:
        """Returns the gradient of the logits, (n, V), in their place.

        With z = logits / T, p = softmax(z): d log p_y / dz_j = [j = y] - p_j, and d H / dz_j = -p_j (log p_j + H).

        Args:
            of_log_probs: The gradient of each log p, (n,).
            of_entropy: The same of the entropies.
        """
        of_log_probs, of_entropy = (g.unsqueeze(-1) / self.temperature for g in (of_log_probs, of_entropy))
        scaled = logits if self.temperature == 1 else logits.div_(self.temperature)
        scaled.sub_(normaliser.unsqueeze(-1))
        if self.entropy_gradient:
            factor = _finite(logits).add(entropy.unsqueeze(-1)).mul_(of_entropy).add_(of_log_probs).neg_()
            gradient = logits.exp_().mul_(factor)
        else:
            gradient = logits.exp_().mul_(-of_log_probs)
        return gradient.scatter_add_(-1, labels.unsqueeze(-1), of_log_probs)

    def result(self, found: tuple[Tensor, Tensor]) -> TokenLogProbs:
        """Returns log-probabilities and entropies, (N,) each, under their names."""
        return TokenLogProbs(log_probs=found[0], entropy=found[1] if self.entropy else None)


def _finite(log_probs: Tensor) -> Tensor:
    """Returns log-probabilities, in their place, with LEAST for -inf, so that 0 times it is 0."""
    return log_probs.clamp_(min=LEAST)


def log_probs_of_logits(logits: Tensor, labels: Tensor, reading: Reading) -> TokenLogProbs:
    """Returns log-probabilities from the logits of all positions.

    The logits are held for the backward, which writes their gradient over them: nothing else may need them then.

    Args:
        logits: (N, V) in float32 or float64.
        labels: (N,).
    """
    return reading.result(_OfLogits.apply(logits, labels, reading))  # type: ignore[no-untyped-call]


def log_probs_of_hidden(
    hidden: Tensor, head: Head, labels: Tensor, reading: Reading, *, tile_rows: int | None = None
) -> TokenLogProbs:
    """Returns log-probabilities from hidden states, whose logits are made one tile of rows at a time.

    The gradient of the logits is not known before the backward, since it follows from what the loss makes of whole
    sequences. So the first `KEPT` logits are held for it, and those of further tiles are made again. Gradients are
    added up in float32. Until then the head's weight is held whole, also one that is sharded.

    Args:
        hidden: (N, H). Of no row comes nothing that keeps its graph.
        head: Its weight may be frozen, and so may be what the hidden states come from.
        labels: (N,).
        tile_rows: Of one tile; None: what suits the device.
    """
    return reading.result(_of_hidden(hidden, head, labels, reading, tile_rows=tile_rows))


def _of_hidden(
    hidden: Tensor, head: Head, labels: Tensor, reading: Reading, *, tile_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _OfHidden.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        head,
        labels,
        reading,
        tile_rows or default_rows(hidden.device, head.num_logits),
        torch.is_grad_enabled(),
    )
    return found


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        count = default_rows(logits.device, logits.shape[1])
        log_probs, normaliser, entropy = _read(lambda rows: logits[rows], labels, reading, like=logits, num_rows=count)
        ctx.save_for_backward(logits, labels, normaliser, entropy)
        return _kept(ctx, reading, log_probs, entropy)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, *per_row = ctx.saved_tensors
        gradient = logits.detach()  # in place: autograd then refuses a second backward
        for rows in parts(len(gradient), default_rows(gradient.device, gradient.shape[1])):
            ctx.reading.backward(gradient[rows], *(value[rows] for value in (*per_row, *upstream)))
        return gradient, None, None


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        labels: Tensor,
        reading: Reading,
        num_rows: int,
        has_graph: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtype, ctx.num_rows = product_dtype(hidden), num_rows
        ctx.options = {"scale": head.scale, "softcap": head.softcap, "vocabulary": head.vocabulary}
        whole, states = head.detached(), hidden.to(ctx.dtype)
        made, kept = whole.to(ctx.dtype), []

        def logits(rows: slice) -> Tensor:
            values = made.logits(states[rows])
            if has_graph and rows.stop * head.num_logits <= KEPT:
                kept.append(values)
            return values

        with torch.autocast(hidden.device.type, enabled=False):
            log_probs, normaliser, entropy = _read(logits, labels, reading, like=hidden, num_rows=num_rows)
        ctx.save_for_backward(hidden, whole.weight, whole.bias, labels, normaliser, entropy, *kept)
        return _kept(ctx, reading, log_probs, entropy)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser, entropy, *kept = ctx.saved_tensors
        per_row = (labels, normaliser, entropy, *upstream)
        hidden, head = hidden.detach().to(ctx.dtype), Head(weight=weight, bias=bias, **ctx.options).to(ctx.dtype)
        gradients = Gradients(hidden, head, wanted=ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for index, rows in enumerate(parts(len(hidden), ctx.num_rows)):
                logits = kept[index].detach() if index < len(kept) else head.logits(hidden[rows])
                capped = logits if head.softcap is None else logits.clone()
                gradient = ctx.reading.backward(logits, *(value[rows] for value in per_row))
                gradients.add(rows, head.gradient_of_product(gradient, capped))
                del logits, capped, gradient
        return (*gradients.totals, None, None, None, None, None)


def _kept(ctx: Any, reading: Reading, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    ctx.reading = reading
    if not reading.entropy_gradient:
        ctx.mark_non_differentiable(entropy)
    return log_probs, entropy


def _read(
    logits: Callable[[slice], Tensor], labels: Tensor, reading: Reading, *, like: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `Reading.forward` does of all rows, tile by tile."""
    # Written into three tensors that are there before: a small one of each tile would split the memory of the next.
    found = [like.new_empty(len(labels), dtype=wide(like.dtype)) for _ in range(3)]
    for rows in parts(len(labels), num_rows):
        for total, values in zip(found, reading.forward(logits(rows), labels[rows]), strict=True):
            total[rows] = values
    return found[0], found[1], found[2]
