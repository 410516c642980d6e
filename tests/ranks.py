"""Runs a function on several gloo ranks, each a process of its own."""

import gc
import importlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from trainer.distributed import loopback_store

# What is slow to import, once for all ranks: each is a fork of a process that did nothing else. None of ours, which
# that process may find elsewhere. CUDA does not survive a fork.
IMPORTED = ("torch._dynamo", "deepspeed", "transformers.modeling_utils", "peft")
METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
if METHOD == "forkserver":
    mp.get_context(METHOD).set_forkserver_preload(list(IMPORTED))


def run_ranks(
    function: Callable[..., Any], *args: Any, folder: Path, world_size: int, timeout: float = 240
) -> list[Any]:
    """Returns [function(*args) on rank 0, on rank 1, ...]; raises with the child's traceback if one fails or hangs."""
    store = loopback_store()  # here, on a port that nobody else can take before the ranks do
    given = (function, args, world_size, store.port, folder, dict(os.environ))
    context = mp.start_processes(_run_one, given, nprocs=world_size, join=False, start_method=METHOD)
    deadline = time.monotonic() + timeout
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{function.__name__} on {world_size} ranks took over {timeout} s; does one rank hang?")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_one(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    port: int,
    folder: Path,
    environment: Mapping[str, str],
) -> None:
    os.environ.clear()  # a fork has that of the first call
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(True),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    for module in (*IMPORTED, "trainer.trainer"):
        importlib.import_module(module)
    gc.freeze()  # or each model's gc.collect goes through all that was imported, for 0.4 s
    try:
        torch.save(function(*args), folder / f"rank{rank}.pt")
    except BaseException:
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        raise
