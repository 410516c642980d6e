"""Collectives over all ranks, and who this process is among them."""

import functools
import os
import socket
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def rank() -> int:
    """Returns this process's index among all ranks."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Returns the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """Returns whether this is rank 0."""
    return rank() == 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the element-wise sum over all ranks; every rank must call it with the same shape."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def check_alike(names: Sequence[str], *, what: str, device: torch.device) -> None:
    """Raises ValueError, on every rank, unless all ranks have the same names; every rank must call it.

    Tables whose columns differ would be added up wrongly, or wait for each other forever.

    Args:
        what: Of what they are the names, such as "metrics of training_step".
    """
    if world_size() == 1:
        return
    code = zlib.crc32("\n".join(names).encode())
    mine = torch.tensor([code, code * code % 2**62], dtype=torch.int64, device=device)
    # Equal sums of the codes and of their squares: a variance of zero.
    if torch.equal(sum_over_ranks(mine), mine * world_size()):
        return
    by_rank = gather(list(names))
    shown = "; ".join(f"rank {rank}: {', '.join(theirs) or 'none'}" for rank, theirs in enumerate(by_rank))
    raise ValueError(f"the ranks have different {what} ({shown}); return the same names on every rank, in every batch")


def gather_with_gradient(rows: Tensor) -> tuple[Tensor, int]:
    """Returns the rows of all ranks in their order, (N, ...), and which of them is this rank's first.

    Ranks may have different numbers of rows. A gradient of any rank's result flows back to the rank whose rows they
    are: what makes the negatives of a contrastive loss right on several ranks. Every rank must call it, and must
    backpropagate through it if one does.

    Args:
        rows: This rank's, (B, ...).
    """
    if world_size() == 1:
        return rows, 0
    sizes = torch.zeros(world_size(), dtype=torch.long, device=rows.device)
    sizes[rank()] = len(rows)
    counts = sum_over_ranks(sizes).tolist()
    padding = rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])
    gathered: Tensor = _Gather.apply(torch.cat([rows, padding]))  # type: ignore[no-untyped-call]
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]), sum(counts[: rank()])


class _Gather(torch.autograd.Function):
    """(B, ...) of each rank to (ranks, B, ...); back comes the sum of all ranks' gradients."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return sum_over_ranks(gradient)[rank()]


def set_timeouts(seconds: float) -> None:
    """Makes every group of ranks wait that long for a peer; DeepSpeed makes its own with torch's half an hour."""
    if dist.is_initialized():
        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def any_rank(condition: bool, *, device: torch.device) -> bool:
    """Returns whether the condition holds on at least one rank."""
    return bool(sum_over_ranks(torch.tensor(float(condition), device=device)).item() > 0)


def from_main(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if world_size() == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def gather(value: Any) -> list[Any]:
    """Returns every rank's value, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Waits until every rank is here."""
    if world_size() > 1:
        dist.barrier()


def loopback_store() -> TCPStore:
    """Returns a rendezvous that this process hosts, on loopback and a port that the system picks.

    torch's own would listen on all interfaces, where anyone may write to it what ranks then unpickle.
    """
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = int(server.getsockname()[1])
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


@functools.cache  # it lives as long as the process: whatever makes a process group asks it
def _own_store() -> TCPStore:
    return loopback_store()


def ensure_environment() -> None:
    """Makes this process the only rank when no launcher has said otherwise."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(_own_store().port), TORCHELASTIC_USE_AGENT_STORE=str(True))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
