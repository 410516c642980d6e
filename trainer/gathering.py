"""Whole weights of a ZeRO-3 model for a while, as generation reads each of them once for every token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer import distributed

# While they are gathered, DeepSpeed holds the weights twice: as they came from the ranks, and put together.
COPIES = 2


def fits_whole(module: nn.Module, *, device: torch.device) -> bool:
    """Returns whether every rank has the memory to gather all weights of a model; every rank must call it."""
    needed = COPIES * whole_bytes(module)
    return not distributed.any_rank(needed > free_bytes(device), device=device)


def whole_bytes(module: nn.Module) -> int:
    """Returns the memory that all weights of a model take, sharded or not, in bytes."""
    return sum(int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in module.parameters())


def free_bytes(device: torch.device) -> int:
    """Returns the memory that this rank may still take: of its GPU, else its share of the host's, in bytes."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free, _ = torch.cuda.mem_get_info(device)
    # torch keeps what it has freed.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


@contextmanager
def whole_weights(engine: Any, module: nn.Module) -> Iterator[None]:
    """Holds all weights of a ZeRO-3 model on every rank, to be read only; every rank must enter it.

    Inside, DeepSpeed does not see the model's forwards: they need no other rank, so that each may make as many as it
    likes, and the order of modules by which DeepSpeed fetches weights ahead stays that of the training.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    offload = _offload_of(engine)
    engine.empty_partition_cache()  # a weight that was fetched ahead and not used cannot be gathered
    with GatheredParameters(list(module.parameters())):
        handles = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
        with _without_hooks(handles):
            yield


def forget_order(engine: Any) -> None:
    """Has a ZeRO-3 engine learn anew in which order its modules run, after forwards that were no training's.

    Every rank must call it. All weights are partitioned afterwards.
    """
    coordinator = _offload_of(engine).get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    engine.empty_partition_cache()


def _offload_of(engine: Any) -> Any:
    """Returns what fetches and frees the weights; without an optimizer it stands in its place."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, DeepSpeedZeRoOffload) else optimizer.parameter_offload


@contextmanager
def _without_hooks(handles: list[RemovableHandle]) -> Iterator[None]:
    """Takes hooks off for a while, and puts them back in their places among the others."""
    tables = {id(table): table for handle in handles if (table := handle.hooks_dict_ref()) is not None}
    kept = {key: dict(table) for key, table in tables.items()}
    for handle in handles:
        table = handle.hooks_dict_ref()
        if table is not None:
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for key, table in tables.items():
            added = {number: hook for number, hook in table.items() if number not in kept[key]}
            table.clear()
            table.update(kept[key] | added)
