"""Runs of task=sft on real engines: one update of 32 examples cut in every way, a run of some steps, and LoRA."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.logits.heads import HeadTaps
from tasks.sft import SFTTask
from tests.tasks import normalisation_runs as normalisation
from tests.tasks.task_runs import (
    LR,
    SHARED,
    fit,
    llama,
    shared_data,
    shared_texts,
    shared_validation,
    trained,
    windows,
    zero,
)
from tests.trainer.test_assets import tiny_llama
from trainer import IGNORED
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.packing import pack
from trainer.data.text import TextDataset

ADAPTER = {"r": 4, "target_modules": "all-linear"}


class DenseSft(SFTTask):
    """Of a model whose head cannot be tapped."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        assert self.taps.taps
        self.taps = HeadTaps()


def labels_of(example: Example, mask: str) -> Tensor:
    values = example.labels if mask == "completion" else example.input_ids
    return torch.from_numpy(values.astype(np.int64))


def scores(model: Any, examples: list[Example], mask: str) -> tuple[Tensor, float, int]:
    """Returns the summed cross-entropy, how many tokens are the most likely ones, and their count, row by row."""
    total, right, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for example in examples:
        labels = labels_of(example, mask)[1:]
        logits = model(input_ids=torch.from_numpy(example.input_ids.astype(np.int64))[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels, reduction="sum")
        counted = labels != IGNORED
        right += float((logits.argmax(-1) == labels)[counted].sum())
        count += int(counted.sum())
    return total, right, count


@functools.cache
def one_update(mask: str) -> normalisation.Weights:
    """Returns the weights after one step of plain SGD on all examples, in float64."""
    model = tiny_llama().double()
    total, _, count = scores(model, normalisation.make_examples(), mask)
    (total / count).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=normalisation.LR).step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def plain_run(mask: str) -> tuple[normalisation.Weights, list[dict[str, float]]]:
    """Returns the weights after the steps of a run, and what each of them and both validations measure."""
    model = llama("small").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    texts, measured = shared_texts(), []

    def held_out() -> dict[str, float]:
        with torch.no_grad():
            return means(*scores(model, shared_validation(), mask))

    measured.append(held_out())
    for window in windows(len(texts), SHARED):
        total, right, count = scores(model, [texts[index] for index in window], mask)
        optimizer.zero_grad()
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        measured.append(means(total.detach(), right, count))
    measured.append(held_out())
    return {name: value.detach() for name, value in model.state_dict().items()}, measured


def means(total: Tensor, right: float, count: int) -> dict[str, float]:
    return {"cross_entropy": float(total) / count, "token_accuracy": right / count}


def run_sft(world_size: int) -> dict[str, Any]:
    """Returns each cut's largest difference from one plain update, and what the runs found."""
    layouts, differences = normalisation.LAYOUTS[world_size], {}
    examples = TextDataset(normalisation.make_examples(), prompts=[])
    blocks = TextDataset(pack(normalisation.make_examples(), normalisation.BLOCK), prompts=[])

    def update(name: str, layout: tuple[int, int], *, kind: type[SFTTask] = SFTTask, mask: str = "completion",
               stage: int = 2, data: Any = examples, side: Any = "right") -> None:  # fmt: skip
        weights = normalisation.fit(
            kind(student="model", mask=mask), layout, stage=stage, data=data, build=tiny_llama,
            collate=PaddingCollator(2, padding_side=side),
        )  # fmt: skip
        differences[name] = normalisation.difference(weights, one_update(mask))

    update("right", layouts[0])
    update("accumulated", layouts[1])
    update("one by one", layouts[2], stage=3)
    update("left", layouts[1], side="left")
    update("dense", layouts[1], kind=DenseSft, stage=0)
    update("all", layouts[1], mask="all")
    size = -(-len(blocks) // (2 * world_size))
    for mask in ("completion", "all"):
        update(f"packed, {mask}", (size, 2), data=blocks, mask=mask)

    def run(*, mask: str = "completion", **options: Any) -> Any:
        models = {"student": trained(llama, "small", **options)}
        return fit(SFTTask(mask=mask), models, {"student": zero(3)}, shared_data(world_size))[1]

    return {
        "differences": differences,
        "completion": run(),
        "all": run(mask="all"),
        "lora": run(lora=ADAPTER),
    }
