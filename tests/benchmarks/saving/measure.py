"""What is measured, on every rank: a checkpoint of this trainer, and the same tensors by torch.save and torch.load."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from trainer import ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData, distributed
from trainer.saving.checkpoints import CheckpointPlan, find_all
from trainer.saving.content import choose, give_back, take

Numbers = dict[str, list[float]]


class Fit(TaskModule):
    """Lets each model learn to return its input."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses={name: (m(batch["x"]) - batch["x"]).pow(2).mean() for name, m in self.models.items()})


def measure(millions: int, stages: tuple[int, ...], repeats: int, folder: Path) -> Numbers:
    """Returns seconds and bytes of each repeat, on this rank."""
    width = 1024
    depth = max(1, round(millions * 1e6 / width**2 / len(stages)))
    models = {
        f"model{index}": ModelSpec(
            build=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))),
            optimizer=torch.optim.AdamW,
            dtype=torch.float32,
        )
        for index in range(len(stages))
    }
    plugins = {name: {"zero_optimization": {"stage": s}} for name, s in zip(models, stages, strict=True)}
    trainer = MultiModelTrainer(plugins, max_steps=3, folder=folder / "run", checkpoint=CheckpointPlan())
    (folder / "run").mkdir(exist_ok=True, parents=True)
    reset_peak()
    rows = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    trainer.fit(Fit(), models=models, data=TrainingData(train=[{"x": row} for row in rows]))
    training = peak_bytes()
    found: Numbers = {name: [] for name in ("save", "torch.save", "resume", "torch.load", "memory")}
    assert trainer.saver is not None
    for repeat in range(repeats):
        trainer.global_step += 1
        for is_ours in (bool(repeat % 2), not repeat % 2):
            settle()
            if is_ours:
                reset_peak()
                found["save"].append(seconds_of(lambda: trainer.saver.save(trainer)))  # type: ignore[union-attr]
                found["memory"].append(peak_bytes() / training)
            else:
                found["torch.save"].append(seconds_of(lambda: save_plainly(trainer, folder)))
    path = find_all(folder / "run" / "checkpoints")[0]
    for repeat in range(repeats):
        for is_ours in (bool(repeat % 2), not repeat % 2):
            settle()
            if is_ours:
                found["resume"].append(seconds_of(lambda: give_back(trainer, choose([path]).path)))
            else:
                found["torch.load"].append(seconds_of(lambda: load_plainly(trainer, folder)))
    return found


def save_plainly(trainer: MultiModelTrainer, folder: Path) -> None:
    """What a user would write: each rank's tensors in one file, flushed to the disk, and its checksum."""
    file = folder / f"plain-{trainer.rank}.pt"
    torch.save([tensors for tensors, _ in take(trainer).tensors.values()], file)
    digest(file)
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    distributed.barrier()


def load_plainly(trainer: MultiModelTrainer, folder: Path) -> None:
    """And back: the checksum, the tensors, and each copied to where it belongs."""
    file = folder / f"plain-{trainer.rank}.pt"
    digest(file)
    saved = torch.load(file, weights_only=True)
    for (tensors, _), values in zip(take(trainer).tensors.values(), saved, strict=True):
        for key, value in values.items():
            tensors[key].data.copy_(value)
    distributed.barrier()


def digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def settle() -> None:
    """Waits until the disk has nothing left to write: what one side has written would slow the other down."""
    os.sync()
    distributed.barrier()


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def reset_peak() -> None:
    """Makes the kernel forget the peak of this process's resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
