"""A small network learns the features of a frozen, larger one: the task, its models and its data."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer import TaskModule


class MatchFeatures(TaskModule):
    """Trains the student to give the teacher's features, in mean squared error over the examples."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.errors(batch).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"error": self.errors(batch).mean()}

    def errors(self, batch: dict[str, Tensor]) -> Tensor:
        student, teacher = self.models["student"](batch["x"]), self.models["teacher"](batch["x"])
        return (student - teacher).pow(2).mean(-1)  # (B,)


class Points(Dataset[dict[str, Tensor]]):
    """Points drawn from a normal distribution; the same seed gives the same points."""

    def __init__(self, *, num_points: int, size: int, seed: int) -> None:
        self.x = torch.randn(num_points, size, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


def mlp(*, size: int, hidden: int, features: int) -> nn.Module:
    """Returns a network from (B, size) to (B, features)."""
    return nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, features))
