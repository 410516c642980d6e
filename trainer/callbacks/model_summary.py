"""Prints what each model consists of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from torch import nn

from trainer.adapters import is_adapted
from trainer.callbacks.callback import Callback
from trainer.handle import num_elements

if TYPE_CHECKING:
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer

PLAIN_WIDTH = 120  # columns where the output is no terminal


class ModelSummary(Callback):
    """Prints a table of modules per model, down to `max_depth` levels, on rank 0."""

    def __init__(self, *, max_depth: int = 2) -> None:
        self.max_depth = max_depth

    def setup(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        if not trainer.is_main:
            return
        console = Console()
        for name, handle in trainer.models.items():
            module = handle.module.get_base_model() if is_adapted(handle.module) else handle.module
            table = summary_table(name, module, max_depth=self.max_depth)
            console.print(table, width=None if console.is_terminal else PLAIN_WIDTH)


def summary_table(name: str, module: nn.Module, *, max_depth: int) -> Table:
    """Returns a table of a model's modules with their weights; a weight that is shared counts once per row.

    Counts are those of the whole model, also where ZeRO-3 leaves only a partition on this rank.
    """
    table = Table(title=f"{name}: {type(module).__name__}", title_justify="left")
    for column in ("module", "class", "parameters", "trainable", "dtype"):
        table.add_column(column, justify="right" if column in ("parameters", "trainable") else "left")
    for path, child, depth in _walk(module, max_depth=max_depth):
        table.add_row("  " * depth + (path.rpartition(".")[2] or name), type(child).__name__, *_numbers(child))
    return table


def _walk(module: nn.Module, *, max_depth: int, path: str = "", depth: int = 0) -> Iterator[tuple[str, nn.Module, int]]:
    yield path, module, depth
    if depth < max_depth:
        for name, child in module.named_children():
            yield from _walk(child, max_depth=max_depth, path=f"{path}.{name}", depth=depth + 1)


def _numbers(module: nn.Module) -> tuple[str, str, str]:
    counts = [(num_elements(parameter), parameter.requires_grad) for parameter in module.parameters()]
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    total, trainable = sum(count for count, _ in counts), sum(count for count, trains in counts if trains)
    return f"{total:,}", f"{trainable:,}", ", ".join(sorted(dtypes))
