"""The plan of a run: one table that says how each model is held, stepped and scheduled."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import rich
from rich.console import Console
from rich.table import Table

from trainer.plugins import Config, dtype_name

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.trainer import MultiModelTrainer

FIELDS = (
    "role", "plugin", "offload", "parameters", "this rank's share", "dtype", "micro-batch", "accumulation", "updates",
    "clipping", "optimizer", "schedule",
)  # fmt: skip


def show_plan(trainer: MultiModelTrainer, *, batch_size: int, trains: bool) -> None:
    """Prints the plan, and saves it as plan.txt where the run has a folder."""
    table = plan_table(trainer, batch_size=batch_size, trains=trains)
    rich.print(table)
    if trainer.folder is not None:
        (trainer.folder / "plan.txt").write_text(plan_text(table), encoding="utf-8")


def plan_table(trainer: MultiModelTrainer, *, batch_size: int, trains: bool = True) -> Table:
    """Returns one column per model; its share is the memory of this rank's part of the weights."""
    length = f"{trainer.max_steps} steps" if trains else "no training"
    table = Table(title=f"{length} on {_ranks(trainer.world_size)}, {trainer.device.type}")
    table.add_column("plan")
    for name in trainer.models:
        table.add_column(name)
    columns = [plan_column(model, batch_size=batch_size) for model in trainer.models.values()]
    for field, *cells in zip(FIELDS, *columns, strict=True):
        table.add_row(field, *cells)
    return table


def plan_text(table: Table) -> str:
    """Returns the table as plain text, to be saved."""
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table)
    return out.getvalue()


def plan_column(model: ModelHandle, *, batch_size: int) -> list[str]:
    """Returns a model's cells, in the order of FIELDS."""
    config = model.config or {}
    trained = model.trainable
    return [
        "trained" if trained else "frozen",
        "replicate" if model.stage is None else f"ZeRO-{model.stage}",
        _offload(config),
        _count(model.num_parameters) + (f" ({_count(model.num_trainable)} trained)" if _is_partial(model) else ""),
        _bytes(model.local_bytes()),
        dtype_name(model.dtype),
        str(config.get("train_micro_batch_size_per_gpu", batch_size)),
        str(model.accumulation) if trained else "-",
        str(model.plan) if trained else "-",
        _clipping(config) if trained else "-",
        type(model.optimizer).__name__ if trained else "-",
        model.schedule if trained else "-",
    ]


def _is_partial(model: ModelHandle) -> bool:
    return model.trainable and model.num_trainable < model.num_parameters


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _bytes(number: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def _offload(config: Config) -> str:
    zero = config.get("zero_optimization", {})
    parts = {"optimizer": "offload_optimizer", "weights": "offload_param"}
    devices = {part: (zero.get(block) or {}).get("device", "none") for part, block in parts.items()}
    return ", ".join(f"{part} on {device}" for part, device in devices.items() if device != "none") or "-"


def _clipping(config: Config) -> str:
    return str(config["gradient_clipping"]) if config.get("gradient_clipping") else "off"
