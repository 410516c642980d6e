"""One loss from hidden states, forward and backward: the dense forms, TRL's chunked function, and ours.

As a module it is the process that measures one of them: python -m tests.benchmarks.distill.kernels fused 2048 49152
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from tests.benchmarks.distill.measure import (
    Numbers,
    check_same_work,
    interleave,
    num_cores,
    peak_bytes,
    settle_memory,
    write_numbers,
)

HIDDEN = 576  # of SmolLM2-135M
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # student hidden, its head, teacher hidden, its head


def textbook(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """What everybody writes first: both logits, two log_softmax, kl_div, and autograd."""
    with torch.no_grad():
        log_p = torch.log_softmax(teacher_hidden @ teacher_weight.T, dim=-1)
    log_q = torch.log_softmax(hidden @ weight.T, dim=-1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def dense(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Our divergence on whole logits: its gradient is the closed form."""
    from tasks.losses import forward_kl

    with torch.no_grad():
        teacher = teacher_hidden @ teacher_weight.T
    return forward_kl(hidden @ weight.T, teacher).mean()


def chunked(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """TRL's function behind DistillationTrainer; its forward is run again in the backward."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence, _ = ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, 0.0)
    return divergence.mean()


def fused(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Ours in tiles: the gradient is computed in the forward."""
    from tasks.logits.fused import fused_loss
    from tasks.logits.heads import Head
    from tasks.losses import forward_kl

    teacher_head = Head(weight=teacher_weight)

    def loss(student: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = teacher_head.logits(teacher_hidden[rows])
        total = forward_kl(student, teacher).sum()
        return total / len(hidden), total.detach().view(1)

    return fused_loss(hidden, Head(weight=weight), loss)[0]


LOSSES: dict[str, Loss] = {"textbook": textbook, "dense": dense, "TRL chunked": chunked, "fused": fused}


def measure(loss: Loss, *, num_tokens: int, vocabulary: int, repeats: int) -> Numbers:
    """Returns the median seconds of a forward and backward, and its most memory beyond the head's gradient."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, teacher_hidden = tensor(num_tokens, HIDDEN).requires_grad_(), tensor(num_tokens, HIDDEN)
    weight, teacher_weight = (tensor(vocabulary, HIDDEN).mul_(HIDDEN**-0.5) for _ in range(2))
    weight.requires_grad_()
    # A first small run, whose memory counts as there before: libraries load what they need on first use.
    loss(hidden[:8], weight[:512], teacher_hidden[:8], teacher_weight[:512]).backward()  # type: ignore[no-untyped-call]
    seconds, memory, value = [], 0, 0.0
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        before = settle_memory()
        began = time.perf_counter()
        result = loss(hidden, weight, teacher_hidden, teacher_weight)
        result.backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - began)
        memory = max(memory, peak_bytes() - before - weight.numel() * weight.element_size())
        value = result.item()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "time (s)": statistics.median(seconds),
        "extra memory (MB)": memory / 1e6,
        "value": value,
        "gradient of hidden": hidden.grad.norm().item(),
        "gradient of head": weight.grad.norm().item(),
    }


def compare(*, num_tokens: int, vocabularies: list[int], repeats: int) -> list[Table]:
    """Returns a table per vocabulary: medians, and what ours takes of the other's."""
    tables = []
    for vocabulary in vocabularies:
        commands = {
            name: ["tests.benchmarks.distill.kernels", name, str(num_tokens), str(vocabulary)] for name in LOSSES
        }
        found = interleave(commands, repeats=repeats, num_threads=num_cores())
        for key in ("value", "gradient of hidden", "gradient of head"):
            check_same_work(found, key, tolerance=1e-4)
        title = f"forward KL, {num_tokens} tokens, hidden {HIDDEN}, vocabulary {vocabulary}; median of {repeats} runs"
        table = Table("", "time (s)", "extra memory (MB)", "fused takes, time", "memory", title=title)
        for name, numbers in found.items():
            ratios = (f"{found['fused'][key] / numbers[key]:.2f}" for key in ("time (s)", "extra memory (MB)"))
            table.add_row(name, f"{numbers['time (s)']:.2f}", f"{numbers['extra memory (MB)']:.0f}", *ratios)
        tables.append(table)
    return tables


if __name__ == "__main__":
    name, num_tokens, vocabulary = sys.argv[1:]
    write_numbers(measure(LOSSES[name], num_tokens=int(num_tokens), vocabulary=int(vocabulary), repeats=2))
