"""The same 32 examples of unequal length in one update, cut and laid out in every way; and what plain PyTorch does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tasks.disjoint import DisjointTask
from tests.trainer.test_assets import tiny_llama
from tests.trainer.test_trainer import reset_accelerate
from trainer import IGNORED, Batch, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.packing import pack
from trainer.data.text import TextDataset
from trainer.handle import gathered_state_dict

NUM_EXAMPLES, BLOCK, LR, CLIP = 32, 40, 0.02, 0.5
LAYOUTS = {
    1: [(32, 1), (8, 4), (1, 32)],
    2: [(8, 2), (2, 8), (1, 16)],
    3: [(4, 3)],
}  # ranks: (micro-batch, accumulation)
Weights = dict[str, Tensor]


def make_examples() -> list[Example]:
    """Lengths from 2 to 33 tokens; the fourth has no label at all, so that a micro-batch of one example has none."""
    draw = np.random.default_rng(0)
    examples = []
    for index in range(NUM_EXAMPLES):
        tokens = draw.integers(3, 250, size=2 + index, dtype=np.int32)
        labels = tokens.copy()
        labels[: index // 3] = IGNORED  # a prompt
        if index == 3:
            labels[:] = IGNORED
        examples.append(Example(input_ids=tokens, labels=labels))
    return examples


def reference(*, clip: float | None = None, plain_means_of: int | None = None) -> Weights:
    """One plain process in float64, an example at a time, without any padding.

    Args:
        plain_means_of: Instead of the mean over all tokens, the mean of the means of micro-batches of so many examples.
    """
    model = tiny_llama().double()
    parts = []
    for example in make_examples():
        tokens = torch.from_numpy(example.input_ids.astype(np.int64))[None]
        labels = torch.from_numpy(example.labels.astype(np.int64))[None, 1:]
        logits = model(input_ids=tokens).logits[:, :-1]
        parts.append((F.cross_entropy(logits[0], labels[0], reduction="sum"), int((labels != IGNORED).sum())))
    if plain_means_of is None:
        loss = sum(total for total, _ in parts) / sum(count for _, count in parts)
    else:
        micros = [parts[i : i + plain_means_of] for i in range(0, len(parts), plain_means_of)]
        means = [sum(t for t, _ in micro) / max(1, sum(n for _, n in micro)) for micro in micros]
        loss = sum(means) / len(means)
    loss.backward()  # type: ignore[union-attr]
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


class PlainMeans(DisjointTask):
    """What everybody writes: the mean of a micro-batch, as if each counted alike."""

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        return dict.fromkeys(self.models, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        sums = super().training_step(batch, batch_idx).sums
        counted = (batch["labels"][:, 1:] != IGNORED).sum().clamp(min=1)
        return StepOutput(losses={name: total / counted for name, total in sums.items()})


def fit(
    task: TaskModule,
    layout: tuple[int, int],
    *,
    stage: int,
    data: Dataset[Any] | list[Any],
    build: Callable[[], nn.Module],
    collate: Callable[..., Batch],
    clip: float | None = None,
) -> Weights | None:
    from deepspeed import DeepSpeedEngine

    reset_accelerate()
    trainer = MultiModelTrainer(
        {"model": {"zero_optimization": {"stage": stage}}}, max_steps=1, gradient_accumulation_steps=layout[1]
    )
    spec = ModelSpec(
        build=build, optimizer=functools.partial(torch.optim.SGD, lr=LR), dtype=torch.float32, max_grad_norm=clip
    )
    trainer.fit(task, models={"model": spec}, data=TrainingData(train=data, batch_size=layout[0], collate=collate))  # type: ignore[arg-type]
    engine = trainer.models["model"].engine
    assert isinstance(engine, DeepSpeedEngine) and engine.zero_optimization_stage() == stage
    trainer.models["model"].settle()
    weights = gathered_state_dict(trainer.models["model"].module)
    return weights if trainer.is_main else None


def difference(weights: Weights | None, expected: Mapping[str, Tensor]) -> float:
    if weights is None:
        return 0.0
    return max(float((weights[name].double() - value).abs().max()) for name, value in expected.items())


def run_layouts(folder: Path) -> dict[str, float]:
    """Returns the largest difference from plain PyTorch on rank 0, by case."""
    from trainer import distributed

    layouts = LAYOUTS[distributed.world_size()]
    examples = TextDataset(make_examples(), prompts=[])
    whole, clipped = reference(), reference(clip=CLIP)
    found = {}

    def run(name: str, layout: tuple[int, int], expected: Weights, *, task: TaskModule | None = None,
            side: Literal["left", "right"] = "right", stage: int = 2, data: Dataset[Any] = examples,
            clip: float | None = None) -> None:  # fmt: skip
        weights = fit(
            task or DisjointTask(), layout, stage=stage, data=data, clip=clip, build=tiny_llama,
            collate=PaddingCollator(2, padding_side=side),
        )  # fmt: skip
        found[f"{name} {layout[0]}x{layout[1]}"] = difference(weights, expected)

    for layout in layouts:
        run("right", layout, whole)
        run("left", layout, whole, side="left")
        run("clipped", layout, clipped, clip=CLIP)
        run("plain means", layout, whole, task=PlainMeans())
    run("zero0", layouts[0], whole, stage=0)
    run("zero3", layouts[-1], whole, stage=3)
    blocks = pack(make_examples(), BLOCK)
    for accumulation in (1, 4):
        size = -(-len(blocks) // (accumulation * distributed.world_size()))
        packed = TextDataset(blocks, prompts=[])
        run("packed", (size, accumulation), whole, data=packed)
    found.update(run_pairs(layouts))
    return found


# A task whose item is a pair


class PairTask(TaskModule):
    """A preference loss over pairs of sequences, as in DPO without a reference; the item is the pair."""

    def count_items(self, batch: Batch) -> Tensor:
        return batch["is_pair"].sum()

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        values = pair_losses(self.models["model"], batch) * batch["is_pair"]
        return StepOutput(losses={"model": values.sum() / batch["is_pair"].sum().clamp(min=1)})


def pair_losses(model: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    chosen = (model(batch["chosen"]).squeeze(-1) * batch["chosen_mask"]).sum(1)
    rejected = (model(batch["rejected"]).squeeze(-1) * batch["rejected_mask"]).sum(1)
    return -F.logsigmoid(chosen - rejected)


def make_scorer() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_pairs() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for index in range(NUM_EXAMPLES):
        pair = {"is_pair": torch.tensor(float(index % 5 != 1))}  # every fifth has no judgement
        for position, name in enumerate(("chosen", "rejected")):
            pair[name] = torch.randn(8, 4, generator=generator)
            pair[f"{name}_mask"] = (torch.arange(8) < 1 + (index + 3 * position) % 8).float()
        pairs.append(pair)
    return pairs


def pair_reference() -> Weights:
    model = make_scorer().double()
    batch = {key: torch.stack([pair[key] for pair in make_pairs()]).double() for key in make_pairs()[0]}
    ((pair_losses(model, batch) * batch["is_pair"]).sum() / batch["is_pair"].sum()).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def run_pairs(layouts: list[tuple[int, int]]) -> dict[str, float]:
    from torch.utils.data import default_collate

    expected = pair_reference()
    return {
        f"pairs {layout[0]}x{layout[1]}": difference(
            fit(PairTask(), layout, stage=1, data=make_pairs(), build=make_scorer, collate=default_collate), expected
        )
        for layout in layouts
    }
