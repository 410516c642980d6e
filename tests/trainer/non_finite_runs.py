"""Runs with one window that is poisoned, on real engines, and what is left of it; several tests read one run."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.trainer.several_checks import InfiniteGradient
from tests.trainer.several_runs import (
    EXAMPLES,
    LOSSES,
    OPTIMIZERS,
    STEPS,
    Model,
    difference,
    disjoint,
    global_batches,
    make_data,
    reference,
    spec,
    weights_of,
    zero,
)
from tests.trainer.test_trainer import reset_accelerate
from trainer import (
    Callback,
    CheckpointPlan,
    ModelSpec,
    MultiModelTrainer,
    NonFiniteError,
    StepOutput,
    TaskModule,
    TrainingData,
    distributed,
)
from trainer.data.order import BatchPlan
from trainer.loggers import JsonlLogger
from trainer.updates import UpdatePlan

POISONED = 3  # the step
Found = dict[str, Any]


class Poisoned(TaskModule):
    """Losses of several_runs.py, some of which turn bad at given steps.

    Args:
        constant_at: b's loss, or the only one, is NaN on the last rank, with the gradients that it has otherwise.
        gradient_at: The gradient of a's output is infinite, and the losses are not.
    """

    def __init__(
        self,
        losses: Callable[..., dict[str, Tensor]],
        *,
        constant_at: Sequence[int] = (),
        gradient_at: Sequence[int] = (),
    ) -> None:
        self.losses, self.constant_at, self.gradient_at = losses, constant_at, gradient_at

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> StepOutput:
        step = self.trainer.global_step + 1
        losses = self.losses({name: self._call(name, step) for name in self.models}, batch)
        if step in self.constant_at and self.trainer.rank == self.trainer.world_size - 1:
            losses[list(losses)[-1]] = losses[list(losses)[-1]] + math.nan
        return StepOutput(losses=losses)

    def _call(self, name: str, step: int) -> Model:
        model = self.models[name]

        def run(x: Tensor) -> Tensor:
            output = model(x.to(model.dtype)).float()
            return InfiniteGradient.apply(output) if name == "a" and step in self.gradient_at else output

        return run


class Moved(Dataset[dict[str, Tensor]]):
    """Examples, some in the place of others."""

    def __init__(self, examples: list[dict[str, Tensor]], places: Mapping[int, int]) -> None:
        self.examples, self.places = examples, places

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.examples[self.places.get(index, index)]


class Metrics(Callback):
    order = 100

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.steps.append(dict(metrics))


def fit(
    task: TaskModule,
    plugins: Mapping[str, Any],
    models: Mapping[str, ModelSpec],
    *,
    train: Any,
    accumulation: int = 1,
    steps: int = STEPS,
    own: Mapping[str, TrainingData] | None = None,
    **options: Any,
) -> tuple[MultiModelTrainer, str]:
    """Returns the trainer, and the error that ended the run or ""."""
    reset_accelerate()
    trainer = MultiModelTrainer(
        plugins, max_steps=steps, log_every=1, gradient_accumulation_steps=accumulation, **options
    )
    batch_size = EXAMPLES // (accumulation * distributed.world_size())
    try:
        trainer.fit(task, models=models, data=TrainingData(train=train, batch_size=batch_size))
    except NonFiniteError as error:
        return trainer, str(error)
    return trainer, ""


def indices_of(rank: int, micro_batch: int, *, accumulation: int, step: int = POISONED) -> list[int]:
    plan = BatchPlan(
        EXAMPLES * STEPS,
        batch_size=EXAMPLES // (accumulation * distributed.world_size()),
        accumulation=accumulation,
        rank=rank,
        world_size=distributed.world_size(),
        seed=0,
        shuffle=True,
    )
    _, _, window = next(plan.windows(step - 1))
    return window[micro_batch].indices


def poison(examples: list[dict[str, Tensor]], index: int) -> list[dict[str, Tensor]]:
    examples[index]["x"] = torch.full((4,), math.nan)
    return examples


def poisoned_data(*, accumulation: int, micro_batch: int = 0) -> list[dict[str, Tensor]]:
    """An example of the last rank is NaN."""
    return poison(make_data(), indices_of(distributed.world_size() - 1, micro_batch, accumulation=accumulation)[0])


def batches_without(step: int = POISONED) -> list[list[int]]:
    return [batch for index, batch in enumerate(global_batches(), start=1) if index != step]


# Skipping, against plain PyTorch in float32

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# Losses, stages of a and b, accumulation, optimizer, where the NaN is, and whether both offload their optimizer.
Case = tuple[str, int, int, int, str, str, bool]
CASES: list[Case] = [
    ("disjoint", 0, 1, 1, "adamw", "constant", False),
    ("disjoint", 2, 3, 1, "adamw", "constant", False),
    ("joint", 0, 2, 3, "adamw", "data", False),
    ("joint", 1, 3, 3, "adamw", "constant", False),
    ("chained", 3, 2, 3, "sgd", "data", False),
    ("mutual", 1, 0, 3, "sgd", "constant", False),
    ("mutual", 2, 1, 1, "adamw", "data", False),
    ("disjoint", 1, 2, 3, "adamw", "data", True),
    ("joint", 3, 1, 1, "adamw", "constant", True),
    ("joint", 2, 3, 3, "adamw", "constant", True),
]


def plugin(stage: int, *, offloads: bool) -> dict[str, Any]:
    config = zero(stage)
    if offloads:
        config["zero_optimization"].update(OFFLOAD)
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def check_skip(case: Case) -> Found:
    name, first, second, accumulation, optimizer, kind, offloads = case
    losses, metrics = LOSSES[name], Metrics()
    trainer, error = fit(
        Poisoned(losses, constant_at=[POISONED] if kind == "constant" else []),
        {"a": plugin(first, offloads=offloads), "b": plugin(second, offloads=offloads)},
        {key: spec(key, optimizer, scheduler=constant_schedule) for key in ("a", "b")},
        train=poisoned_data(accumulation=accumulation) if kind == "data" else make_data(),
        accumulation=accumulation,
        non_finite="skip",
        callbacks={"metrics": metrics},
    )
    weights = weights_of(trainer)
    expected = reference(losses, batches_without(), optimizer=optimizer) if trainer.is_main else {}
    return {
        "error": error,
        "difference": difference(weights, expected) if expected else 0.0,
        "stages": [model.engine.zero_optimization_stage() for model in trainer.trained],
        "updates": [(model.num_updates, model.num_skipped, model.skipped_in_a_row) for model in trainer.trained],
        "schedules": [model.scheduler.last_epoch for model in trainer.trained if model.scheduler is not None],
        "losses": [step["train/loss"] for step in metrics.steps],
    }


def constant_schedule(optimizer: torch.optim.Optimizer, **_: Any) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def check_own_accumulation(micro_batch: int) -> Found:
    """a takes two updates in a window, b one; the NaN is in the first or the second micro-batch."""
    trainer, error = fit(
        Poisoned(disjoint),
        {"a": zero(2), "b": zero(3)},
        {"a": spec("a", gradient_accumulation_steps=1), "b": spec("b")},
        train=poisoned_data(accumulation=2, micro_batch=micro_batch),
        accumulation=2,
        non_finite="skip",
    )
    weights = weights_of(trainer)
    found = {"error": error, "updates": [(model.num_updates, model.num_skipped) for model in trainer.trained]}
    if not trainer.is_main:
        return found
    halves = [batch[start : start + EXAMPLES // 2] for batch in global_batches() for start in (0, EXAMPLES // 2)]
    left_out = range(2 * (POISONED - 1) + micro_batch, 2 * POISONED)
    applied = [half for index, half in enumerate(halves) if index not in left_out]
    expected = {"a": reference(disjoint, applied)["a"], "b": reference(disjoint, batches_without())["b"]}
    return {**found, "difference": difference(weights, expected)}


def check_half(stage: int, kind: str, *, offloads: bool = False) -> Found:
    """a in bfloat16: to the last bit what a run without the window gives, whose other windows are the same."""

    def run(train: Any, steps: int, constant_at: list[int]) -> tuple[MultiModelTrainer, dict[str, Any]]:
        trainer, error = fit(
            Poisoned(disjoint, constant_at=constant_at),
            {"a": plugin(stage, offloads=offloads), "b": zero(1)},
            {"a": spec("a", "adamw", dtype=torch.bfloat16), "b": spec("b", "adamw")},
            train=train,
            accumulation=3,
            steps=steps,
            non_finite="skip",
        )
        assert error == ""
        return trainer, weights_of(trainer)

    is_constant = kind == "constant"
    trainer, weights = run(
        make_data() if is_constant else poisoned_data(accumulation=3), STEPS, [POISONED] if is_constant else []
    )
    batches = global_batches()
    later = zip(batches[POISONED - 1 : -1], batches[POISONED:], strict=True)
    places = {to: source for window, following in later for to, source in zip(window, following, strict=True)}
    _, expected = run(Moved(make_data(), places), STEPS - 1, [])
    return {
        "engine": type(trainer.models["a"].engine.optimizer).__name__,
        "updates": [(model.num_updates, model.num_skipped) for model in trainer.trained],
        "equal": all(torch.equal(weights[name][key], expected[name][key]) for name in weights for key in weights[name]),
    }


class Branching(nn.Module):
    """A net whose second layer is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, uses_both: bool = True) -> Tensor:
        made: Tensor = self.first(x)
        return made + self.second(x) if uses_both else made


class UsesHalf(Poisoned):
    """Leaves the second layer out in the step after the poisoned one."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> StepOutput:
        step = self.trainer.global_step + 1
        output = self.models["a"](batch["x"], step <= POISONED)
        return StepOutput(losses={"a": (output - batch["y"]).pow(2).mean()})


def check_unused(stage: int, *, offloads: bool) -> Found:
    """A weight without a gradient in the step after must not take up one of the poisoned step."""
    trainer, error = fit(
        UsesHalf(disjoint),
        {"a": plugin(stage, offloads=offloads)},
        {"a": ModelSpec(build=Branching, optimizer=OPTIMIZERS["sgd"], dtype=torch.float32)},
        train=poisoned_data(accumulation=1),
        steps=POISONED + 1,
        non_finite="skip",
    )
    weights, expected = weights_of(trainer), Branching()
    if not trainer.is_main:
        return {"error": error}
    optimizer, data = OPTIMIZERS["sgd"](expected.parameters()), make_data()
    for step, indices in enumerate(global_batches(POISONED + 1), start=1):
        if step != POISONED:
            batch = {key: torch.stack([data[index][key] for index in indices]) for key in ("x", "y")}
            (expected(batch["x"], step <= POISONED) - batch["y"]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"error": error, "difference": difference(weights, {"a": dict(expected.state_dict())})}


def check_gradient(stage: int, *, accumulation: int = 1, **block: Any) -> Found:
    """An infinite gradient of a under finite losses: a leaves it out and b does not."""
    trainer, error = fit(
        Poisoned(disjoint, gradient_at=[POISONED]),
        {"a": {**zero(stage), **block}, "b": zero(1)},
        {name: spec(name, "adamw", max_grad_norm=1e3) for name in ("a", "b")},
        train=make_data(),
        accumulation=accumulation,
        non_finite="skip",
    )
    weights = weights_of(trainer)
    found = {"error": error, "updates": [(model.num_updates, model.num_skipped) for model in trainer.trained]}
    if not trainer.is_main:
        return found
    expected = {
        "a": reference(disjoint, batches_without(), optimizer="adamw")["a"],
        "b": reference(disjoint, global_batches(), optimizer="adamw")["b"],
    }
    return {**found, "difference": difference(weights, expected)}


# Ending the run


def check_unchecked(dtype: torch.dtype, **block: Any) -> Found:
    """An infinite gradient that DeepSpeed was told not to look for."""
    trainer, error = fit(
        Poisoned(disjoint, gradient_at=[POISONED]),
        {"a": {**zero(2), **block}, "b": zero(1)},
        {"a": spec("a", dtype=dtype), "b": spec("b")},
        train=make_data(),
        non_finite="skip",
    )
    return {"error": error, "step": trainer.global_step}


def check_stop(folder: Path, stage: int) -> Found:
    """An example of the last rank's second micro-batch is NaN."""
    folder = folder / f"stop{stage}"
    folder.mkdir(exist_ok=True)
    trainer, error = fit(
        Poisoned(disjoint),
        {"a": zero(stage), "b": zero(1)},
        {name: spec(name) for name in ("a", "b")},
        train=poisoned_data(accumulation=3, micro_batch=1),
        accumulation=3,
        folder=folder,
    )
    last = trainer.world_size - 1
    return {
        **ended(trainer, error, folder),
        "indices": [
            indices_of(rank, micro, accumulation=3) for rank in range(trainer.world_size) for micro in range(3)
        ],
        "bad": indices_of(last, 1, accumulation=3),
    }


def check_stop_on_gradient(folder: Path, stage: int) -> Found:
    folder = folder / f"gradient{stage}"
    folder.mkdir(exist_ok=True)
    trainer, error = fit(
        Poisoned(disjoint, gradient_at=[POISONED]),
        {"a": zero(stage), "b": zero(1)},
        {name: spec(name) for name in ("a", "b")},
        train=make_data(),
        folder=folder,
        checkpoint=CheckpointPlan(every=POISONED - 1, background=True),
    )
    return {**ended(trainer, error, folder), "saved": sorted(path.name for path in folder.glob("checkpoints/[a-z]*"))}


def check_bound(folder: Path) -> Found:
    """Two skips in a row are one too many; one at the start is not."""
    folder = folder / "bound"
    folder.mkdir(exist_ok=True)
    logger = JsonlLogger()
    logger.start(folder=folder, config={}, name="bound")
    trainer, error = fit(
        Poisoned(disjoint, constant_at=[1, 3], gradient_at=[4]),
        {"a": zero(2), "b": zero(0)},
        {name: spec(name) for name in ("a", "b")},
        train=make_data(),
        folder=folder,
        non_finite="skip",
        max_skipped=1,
        loggers={"jsonl": logger} if distributed.is_main() else {},
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {**ended(trainer, error, folder), "logged": [json.loads(line)["train/b/loss"] for line in lines]}


def ended(trainer: MultiModelTrainer, error: str, folder: Path) -> Found:
    distributed.barrier()
    return {
        "error": error,
        "step": trainer.global_step,
        "updates": [(model.num_updates, model.num_skipped) for model in trainer.trained],
        "is finite": all(bool(w.isfinite().all()) for model in trainer.trained for w in model.local_weights()),
        "files": {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("non_finite*"))},
    }


def own_sets(models: Mapping[str, Model], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: (models[name](part["x"]) - part["y"]).pow(2).mean() for name, part in (("a", batch), ("b", batch["b"]))
    }


def check_own_data() -> Found:
    """An example of b's own set is NaN, without a folder to write to."""
    spec_of_b = spec("b")
    spec_of_b.data = TrainingData(
        train=poison(make_data(), indices_of(0, 0, accumulation=1)[0]), batch_size=EXAMPLES // distributed.world_size()
    )
    _, error = fit(
        Poisoned(own_sets), {"a": zero(1), "b": zero(2)}, {"a": spec("a"), "b": spec_of_b}, train=make_data()
    )
    return {"error": error, "bad": indices_of(0, 0, accumulation=1)}


class PoisonWeights(Callback):
    def on_train_step_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        with torch.no_grad():
            next(iter(trainer.models["a"].module.parameters())).fill_(math.nan)


def check_left_out() -> Found:
    """The weights of a are NaN in a step that leaves it out."""
    trainer, error = fit(
        Poisoned(disjoint),
        {"a": zero(1), "b": zero(2)},
        {"a": spec("a", plan=UpdatePlan(update_every=2)), "b": spec("b")},
        train=make_data(),
        callbacks={"poison": PoisonWeights()},
    )
    return {"error": error, "updates": [(model.num_updates, model.num_skipped) for model in trainer.trained]}


CHECKS: dict[str, Callable[..., Found]] = {
    "own 0": functools.partial(check_own_accumulation, 0),
    "own 1": functools.partial(check_own_accumulation, 1),
    **{f"half {stage} {kind}": functools.partial(check_half, stage, kind)
       for stage, kind in ((0, "data"), (1, "constant"), (2, "data"), (3, "constant"))},
    **{f"half {stage} offload": functools.partial(check_half, stage, "constant", offloads=True) for stage in (2, 3)},
    **{f"gradient {stage}": functools.partial(check_gradient, stage, accumulation=3 if stage in (0, 3) else 1)
       for stage in (0, 1, 2, 3)},
    "gradient autocast": functools.partial(
        check_gradient, 0, torch_autocast={"enabled": True, "dtype": "bfloat16"}
    ),
    **{f"unused {stage} {offloads}": functools.partial(check_unused, stage, offloads=offloads)
       for stage, offloads in ((2, True), (3, False), (3, True))},
    "unchecked": functools.partial(check_unchecked, torch.bfloat16, bf16={"check_grad_overflow": False}),
    "own data": check_own_data,
    "left out": check_left_out,
}  # fmt: skip


def run_checks(folder: Path) -> Found:
    found: Found = {"skip": {case: check_skip(case) for case in CASES}}
    found |= {name: check() for name, check in CHECKS.items()}
    found |= {f"stop {stage}": check_stop(folder, stage) for stage in (0, 3)}
    found |= {f"stop gradient {stage}": check_stop_on_gradient(folder, stage) for stage in (0, 1, 3)}
    return {**found, "bound": check_bound(folder)}
