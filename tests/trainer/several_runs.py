"""Runs of several trained models on real engines, and the same in plain PyTorch; several tests read one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.test_trainer import reset_accelerate
from trainer import Callback, ModelHandle, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.handle import gathered_state_dict
from trainer.updates import UpdatePlan

EXAMPLES = 12  # per global step
STEPS = 5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    # At its default eps AdamW amplifies the rounding of tiny gradients.
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
}
Weights = dict[str, dict[str, Tensor]]
Model = Callable[[Tensor], Tensor]


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


SEEDS = {"a": 1, "b": 2, "c": 3}


def make_data(count: int = EXAMPLES * STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "y": torch.randn(4, generator=generator)} for _ in range(count)]


# Losses, written once for engines and for plain modules


def disjoint(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (models[name](batch["x"]) - batch["y"]).pow(2).mean() for name in ("a", "b")}


def mutual(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    a, b = models["a"](batch["x"]), models["b"](batch["x"])
    return {
        "a": (a - batch["y"]).pow(2).mean() + (a - b.detach()).pow(2).mean(),
        "b": (b - batch["y"]).pow(2).mean() + (b - a.detach()).pow(2).mean(),
    }


def joint(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"joint": (models["a"](batch["x"]) * models["b"](batch["x"]) - batch["y"]).pow(2).mean()}


def chained(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"joint": (models["b"](models["a"](batch["x"])) - batch["y"]).pow(2).mean()}


def forgetful(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`mutual` by someone who forgot to detach: each loss must train its own model all the same."""
    a, b = models["a"](batch["x"]), models["b"](batch["x"])
    return {
        "a": (a - batch["y"]).pow(2).mean() + (a - b).pow(2).mean(),
        "b": (b - batch["y"]).pow(2).mean() + (b - a).pow(2).mean(),
    }


def adversarial(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A generator a and a critic b: a's loss passes through b, which only b's own trains."""
    made = models["a"](batch["x"])
    critic = models["b"]
    passing = critic.module if isinstance(critic, ModelHandle) else critic
    real, fake = critic(batch["y"]).pow(2).mean(), critic(made.detach()).mean()
    return {"a": -passing(made).mean(), "b": real + fake}


def undetached(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`adversarial`, whose critic is fed what a made without a detach."""
    made = models["a"](batch["x"])
    critic = models["b"]
    passing = critic.module if isinstance(critic, ModelHandle) else critic
    return {"a": -passing(made).mean(), "b": critic(batch["y"]).pow(2).mean() + critic(made).mean()}


def pair_and_third(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One loss through a and b, beside c's own."""
    return {**joint(models, batch), "c": (models["c"](batch["x"]) - batch["y"]).pow(2).mean()}


LOSSES = {
    function.__name__: function
    for function in (disjoint, mutual, joint, chained, forgetful, adversarial, undetached, pair_and_third)
}


class LossTask(TaskModule):
    def __init__(self, losses: Callable[..., dict[str, Tensor]]) -> None:
        self.losses = losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses=self.losses(self.models, batch))


# Both sides


def zero(stage: int) -> dict[str, Any]:
    block = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **block}}


def spec(name: str, optimizer: Any = "sgd", **options: Any) -> ModelSpec:
    return ModelSpec(
        build=functools.partial(make_net, SEEDS[name]),
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        **{"dtype": torch.float32, **options},
    )


def fit(
    task: TaskModule,
    plugins: Mapping[str, Any],
    models: Mapping[str, ModelSpec],
    *,
    accumulation: int = 1,
    steps: int = STEPS,
    data: TrainingData | None = None,
    callbacks: dict[str, Callback] | None = None,
    non_finite: str = "stop",
) -> MultiModelTrainer:
    from trainer import distributed

    reset_accelerate()
    trainer = MultiModelTrainer(
        plugins,
        max_steps=steps,
        log_every=1,
        gradient_accumulation_steps=accumulation,
        callbacks=callbacks,
        non_finite=non_finite,
    )
    batch_size = EXAMPLES // (accumulation * distributed.world_size())
    trainer.fit(task, models=models, data=data or TrainingData(train=make_data(), batch_size=batch_size))
    check_engines(trainer, plugins)
    return trainer


OPTIMIZER_CLASSES = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}


def check_engines(trainer: MultiModelTrainer, plugins: Mapping[str, Any]) -> None:
    """Every trained model ran on DeepSpeed's engine and, from ZeRO-1 on, on the optimizer of its stage."""
    from deepspeed import DeepSpeedEngine

    for model in trainer.trained:
        stage = plugins[model.name]["zero_optimization"]["stage"]
        assert isinstance(model.engine, DeepSpeedEngine) and model.engine.zero_optimization_stage() == stage
        assert stage == 0 or type(model.engine.optimizer).__name__ == OPTIMIZER_CLASSES[stage]


def weights_of(trainer: MultiModelTrainer) -> Weights:
    return {name: gathered_state_dict(model.module) for name, model in trainer.models.items()}


def reference(
    losses: Callable[..., dict[str, Tensor]],
    order: list[list[int]],
    *,
    optimizer: str = "sgd",
    plans: Mapping[str, UpdatePlan] | None = None,
) -> Weights:
    """One plain process in float32, each step on the whole batch; every loss by its own `autograd.grad`."""
    data = make_data()
    names = ["a", "b", "c"] if losses is pair_and_third else ["a", "b"]
    models = {name: make_net(SEEDS[name]) for name in names}
    optimizers = {name: OPTIMIZERS[optimizer](model.parameters()) for name, model in models.items()}
    for step, indices in enumerate(order, start=1):
        batch = {key: torch.stack([data[index][key] for index in indices]) for key in ("x", "y")}
        found = losses(models, batch)
        updating = [name for name in names if plans is None or name not in plans or plans[name].counts_in(step)]
        for name in updating:
            loss = found[name] if name in found else found["joint"]
            weights = list(models[name].parameters())
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights, retain_graph=True), strict=True):
                weight.grad = gradient
        for name in updating:
            optimizers[name].step()
            optimizers[name].zero_grad()
    return {name: dict(model.state_dict()) for name, model in models.items()}


def global_batches(steps: int = STEPS) -> list[list[int]]:
    """The examples of each global step, whatever its cut: those of one rank with one micro-batch."""
    from trainer.data.order import BatchPlan

    plan = BatchPlan(
        EXAMPLES * STEPS, batch_size=EXAMPLES, accumulation=1, rank=0, world_size=1, seed=0, shuffle=True
    )  # fmt: skip
    windows = plan.windows()
    return [[index for micro in next(windows)[2] for index in micro.indices] for _ in range(steps)]


def difference(left: Weights, right: Weights) -> float:
    # torch's max, since Python's passes over a NaN
    found = [(left[name][key] - right[name][key]).abs().max() for name in right for key in right[name]]
    return float(torch.stack(found).max())


# The matrix

Case = tuple[str, int, int, int, str]  # losses, stage of a, stage of b, accumulation, optimizer
FACTORS: tuple[tuple[Any, ...], ...] = (
    ("disjoint", "mutual", "joint", "chained"), (0, 1, 2, 3), (0, 1, 2, 3), (1, 3), ("sgd", "adamw"),
)  # fmt: skip


def run_case(case: Case) -> dict[str, Any]:
    """Returns the largest difference from plain PyTorch on rank 0, and which engines ran."""
    name, first, second, accumulation, optimizer = case
    losses = LOSSES[name]
    plugins = {"a": zero(first), "b": zero(second)}
    models = {key: spec(key, optimizer) for key in plugins}
    if losses is pair_and_third:
        plugins["c"], models["c"] = zero(1), spec("c", optimizer)
    trainer = fit(LossTask(losses), plugins, models, accumulation=accumulation)
    engines = [
        (type(trainer.models[key].engine.optimizer).__name__, trainer.models[key].engine.zero_optimization_stage())
        for key in ("a", "b")
    ]
    weights = weights_of(trainer)
    if not trainer.is_main:
        return {"difference": 0.0, "engines": engines}
    expected = reference(losses, global_batches(), optimizer=optimizer)
    return {"difference": difference(weights, expected), "engines": engines}


def run_cases(cases: list[Case]) -> dict[Case, dict[str, Any]]:
    return {case: run_case(case) for case in cases}
