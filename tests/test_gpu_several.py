"""Several trained models of different precision at once: on a GPU in float16, each with its own loss scale.

`pytest -m gpu` runs it where there is one; `pytest -m slow` the same on a CPU, where DeepSpeed has no float16, in
bfloat16.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.trainer.saving.resume_runs import resume_exactly
from tests.trainer.several_checks import InfiniteGradient
from tests.trainer.several_runs import (
    LossTask,
    difference,
    disjoint,
    fit,
    global_batches,
    joint,
    make_net,
    mutual,
    reference,
    spec,
    weights_of,
    zero,
)
from trainer import Callback, MultiModelTrainer, StepOutput, TaskModule
from trainer.callbacks import ModelMonitor

Found = dict[str, Any]


class Metrics(Callback):
    order = 100  # after those who add to them

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.steps.append(dict(metrics))


class HalfTask(LossTask):
    """Feeds each model its own type; with `overflow_at`, a's gradient is infinite in that step."""

    def __init__(self, losses: Any, *, overflow_at: int | None = None) -> None:
        super().__init__(losses)
        self.overflow_at = overflow_at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        is_overflowing = self.trainer.global_step + 1 == self.overflow_at

        def call(name: str) -> Any:
            def run(x: Tensor) -> Tensor:
                output = self.models[name](x.to(self.models[name].dtype))
                if name == "a" and is_overflowing:
                    output = InfiniteGradient.apply(output)
                return output.float()

            return run

        return StepOutput(losses=self.losses({name: call(name) for name in self.models}, batch))


def run_precisions(half: torch.dtype) -> Found:
    """a in half precision beside b in float32, under every stage: equal training, an overflow, and a joint loss."""
    found: Found = {}
    for stage in (1, 2, 3) if half == torch.float16 else (0, 1, 2, 3):
        plugins, models = {"a": zero(stage), "b": zero(2)}, {"a": spec("a", dtype=half), "b": spec("b")}
        for losses in (disjoint, mutual):
            trainer = fit(HalfTask(losses), plugins, models)
            expected = reference(losses, global_batches())
            found[f"{losses.__name__} zero{stage}"] = {
                name: difference({name: weights_of(trainer)[name]}, {name: expected[name]}) for name in ("a", "b")
            }
        metrics = Metrics()
        callbacks: dict[str, Callback] = {"monitor": ModelMonitor(), "last": metrics}
        trainer = fit(
            HalfTask(disjoint, overflow_at=2), plugins, models, steps=3, callbacks=callbacks, non_finite="skip"
        )
        found[f"overflow zero{stage}"] = {
            "updates": {name: model.num_updates for name, model in trainer.models.items()},
            "skipped": [step.get("train/a/skipped_updates") for step in metrics.steps],
            "scale": [step.get("train/a/loss_scale") for step in metrics.steps],
            "scale of b": [step.get("train/b/loss_scale") for step in metrics.steps],
        }
        try:
            trainer = fit(HalfTask(joint), plugins, models)
            found[f"joint zero{stage}"] = difference(weights_of(trainer), reference(joint, global_batches()))
        except ValueError as error:
            found[f"joint zero{stage}"] = str(error)
    found["start"] = float(make_net(1)[0].weight.abs().max())
    return found


def run_in_one_process(folder: Path, half: torch.dtype) -> list[Found]:
    """As run_ranks with one rank, which would set the CPU."""
    os.environ.pop("DS_ACCELERATOR", None)
    return [run_precisions(half)]


def check(found: Found, *, stage: int, half: torch.dtype) -> None:
    for losses in ("disjoint", "mutual"):
        # 5 SGD steps of 0.1 with weights of size 1 in half precision; b sees a's output only as a constant.
        assert found[f"{losses} zero{stage}"]["a"] < 5e-2
        assert found[f"{losses} zero{stage}"]["b"] < (1e-5 if losses == "disjoint" else 1e-2)
    overflow = found[f"overflow zero{stage}"]
    assert overflow["updates"] == {"a": 2, "b": 3}
    assert overflow["skipped"] == [0.0, 1.0, 1.0]
    assert overflow["scale of b"] == [None, None, None]
    if half == torch.float16:
        assert all(scale >= 1 for scale in overflow["scale"])
        assert "models.a is float16: its loss scale would multiply" in found[f"joint zero{stage}"]
    else:
        assert overflow["scale"] == [None, None, None]
        assert found[f"joint zero{stage}"] < 5e-2


@pytest.fixture(scope="module")
def on_gpu() -> Found:
    return run_in_one_process(Path(), torch.float16)[0]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(run_precisions, torch.bfloat16, folder=tmp_path_factory.mktemp("precision"), world_size=1)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float16_beside_float32_on_a_gpu(on_gpu: Found, stage: int) -> None:
    check(on_gpu, stage=stage, half=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_beside_float32_on_a_cpu(on_cpu: Found, stage: int) -> None:
    check(on_cpu, stage=stage, half=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("stages", [(1, 2), (2, 3)])
def test_a_run_goes_on_to_the_last_bit_on_a_gpu(stages: tuple[int, int], half: str, tmp_path: Path) -> None:
    """With the loss scale of float16; small matrices of one shape take the same kernels each time."""
    assert resume_exactly((*stages, 1, "adamw", "disjoint", half), tmp_path) == []
