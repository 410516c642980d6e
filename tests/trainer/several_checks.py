"""Single questions to runs of several trained models; what each rank found, several to one spawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.several_runs import (
    OPTIMIZERS,
    SEEDS,
    Case,
    LossTask,
    Model,
    adversarial,
    chained,
    difference,
    disjoint,
    fit,
    global_batches,
    joint,
    make_data,
    make_net,
    mutual,
    reference,
    run_cases,
    spec,
    weights_of,
    zero,
)
from trainer import Callback, ModelHandle, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.updates import UpdatePlan

# Single questions


def check_plans(folder: Path) -> dict[str, Any]:
    """a in every second window, b up to the fourth, each with a schedule of its own."""
    plans = {"a": UpdatePlan(update_every=2, start_step=1), "b": UpdatePlan(start_step=1, freeze_after=4)}
    schedule = functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.5, total_iters="auto"
    )
    seen: list[dict[str, Any]] = []

    class Watch(Callback):
        def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
            seen.append(
                {
                    "step": trainer.global_step,
                    "updates": {name: model.num_updates for name, model in trainer.models.items()},
                    "lr": {name: model.learning_rate() for name, model in trainer.models.items()},
                    "losses": {
                        name.removeprefix("train/"): value for name, value in metrics.items() if name.endswith("loss")
                    },
                    "training": trainer.models["b"].module.training,
                }
            )

    found: dict[str, Any] = {}
    for stages in ((1, 3), (2, 0)):
        trainer = fit(
            LossTask(disjoint),
            {"a": zero(stages[0]), "b": zero(stages[1])},
            {name: spec(name, plan=plan) for name, plan in plans.items()},
        )
        if trainer.is_main or trainer.world_size > 1:
            weights = weights_of(trainer)
        found[f"weights {stages}"] = (
            difference(weights, reference(disjoint, global_batches(), plans=plans)) if trainer.is_main else 0.0
        )

    class Sparing(LossTask):
        """Returns what this step trains."""

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
            losses = super().training_step(batch, batch_idx).losses
            return StepOutput(losses={name: loss for name, loss in losses.items() if self.models[name].is_updating})

    seen.clear()
    fit(
        Sparing(disjoint),
        {"a": zero(1), "b": zero(2)},
        {name: spec(name, plan=plan, scheduler=schedule) for name, plan in plans.items()},
        callbacks={"watch": Watch()},
    )
    return {**found, "seen": seen}


def check_alternation(folder: Path) -> dict[str, Any]:
    """A generator in every second step through a critic in all others, and the other way round in one loss."""
    plans = {"a": UpdatePlan(start_step=1, update_every=2), "b": UpdatePlan(start_step=2, update_every=2)}
    found = {}
    for stages in ((3, 2), (1, 3), (0, 3)):
        for losses in (adversarial, chained):
            trainer = fit(
                LossTask(losses),
                {"a": zero(stages[0]), "b": zero(stages[1])},
                {name: spec(name, plan=plan) for name, plan in plans.items()},
            )
            weights = weights_of(trainer)
            if trainer.is_main:
                found[f"{losses.__name__} {stages}"] = difference(
                    weights, reference(losses, global_batches(), plans=plans)
                )
    return found


def check_gradients(folder: Path) -> dict[str, float]:
    """What each model's optimizer is about to use in the first step, with AdamW as it comes."""
    from deepspeed.utils import safe_get_full_grad

    found: dict[str, float] = {}
    (indices,) = global_batches(1)
    data = make_data()
    batch = {key: torch.stack([data[index][key] for index in indices]) for key in ("x", "y")}

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
            weights = trainer.models[name].module.parameters()
            self.gradients[name] = [safe_get_full_grad(weight).clone() for weight in weights]

        def __init__(self) -> None:
            self.gradients: dict[str, list[Tensor]] = {}

    for losses in (mutual, joint):
        plain = {name: make_net(SEEDS[name]) for name in ("a", "b")}
        wanted = losses(plain, batch)
        for stages in ((1, 2), (3, 1), (2, 3)):
            look = Look()
            adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
            fit(
                LossTask(losses), {"a": zero(stages[0]), "b": zero(stages[1])},
                {name: spec(name, optimizer=adamw) for name in plain}, steps=1, accumulation=3,
                callbacks={"look": look},
            )  # fmt: skip
            found[f"{losses.__name__} {stages}"] = max(
                float((got.reshape(-1) - expected.reshape(-1)).abs().max())
                for name, net in plain.items()
                for got, expected in zip(
                    look.gradients[name],
                    torch.autograd.grad(
                        wanted.get(name, wanted.get("joint")), list(net.parameters()), retain_graph=True
                    ),
                    strict=True,
                )
            )
    return found


def check_one_rank(folder: Path) -> dict[str, str]:
    """What every rank hears of a fault of the last one alone."""
    from trainer import distributed

    is_last = distributed.rank() == distributed.world_size() - 1

    class Faulty(LossTask):
        def __init__(self, fault: str) -> None:
            super().__init__(disjoint)
            self.fault = fault

        def count_items(self, batch: dict[str, Tensor]) -> dict[str, int | Tensor]:
            others = {"c": 1} if self.fault == "count" and is_last else {}
            return {"a": len(batch["x"]), "b": len(batch["x"]), **others}

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
            output = super().training_step(batch, batch_idx)
            if self.fault == "nan" and is_last:
                output.losses["b"] = output.losses["b"] * float("nan")
            if self.fault == "metric":
                output.metrics["a/n" if is_last else "a/m"] = 1.0
            return output

    found = {}
    for fault in ("nan", "metric", "count"):
        try:
            fit(Faulty(fault), {"a": zero(1), "b": zero(2)}, {"a": spec("a"), "b": spec("b")}, steps=1)
        except (ValueError, RuntimeError) as error:
            found[fault] = str(error)
    return found


def check_noise(folder: Path) -> dict[str, Any]:
    class Noisy(LossTask):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            return {"noise": torch.randn(())}

    data = TrainingData(train=make_data(), validation=make_data(8), batch_size=2)
    trainer = fit(Noisy(only("a")), {"a": zero(1)}, {"a": spec("a")}, data=data, steps=1)
    return {"first": trainer.before, "second": trainer.evaluate()[0]}


def check_document(folder: Path) -> dict[str, Any]:
    """The generator and critic of docs/several-models.md, as they stand there."""
    page = (Path(__file__).parents[2] / "docs" / "several-models.md").read_text(encoding="utf-8")
    block = page.partition("## An example")[2].partition("```python\n")[2].partition("```")[0]
    module: dict[str, Any] = {}
    exec(block, module)
    generator = torch.Generator().manual_seed(0)
    points = [{"x": torch.randn(2, generator=generator) * 0.1 + 1.0} for _ in range(240)]
    adam = functools.partial(torch.optim.Adam, betas=(0.5, 0.9))
    rates = {"generator": 1e-2, "critic": 5e-2}
    build = {"generator": functools.partial(make_small, 2), "critic": functools.partial(make_small, 1)}
    specs = {
        name: ModelSpec(build=build[name], optimizer=functools.partial(adam, lr=rates[name]), dtype=torch.float32)
        for name in build
    }
    specs["generator"].plan = UpdatePlan(update_every=2)
    trainer = fit(
        module["Adversarial"](), {"generator": zero(3), "critic": zero(2)}, specs, steps=80,
        data=TrainingData(train=points, validation=points, batch_size=12),
    )  # fmt: skip
    updates = {name: model.num_updates for name, model in trainer.models.items()}
    return {"updates": updates, "before": trainer.before["val/distance"], "after": trainer.after["val/distance"]}


def make_small(size: int) -> nn.Module:
    torch.manual_seed(size)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, size))


def check_through_frozen(folder: Path) -> dict[str, float]:
    """a's loss passes through a frozen c, sharded or whole, on its way back to a."""

    def through(models: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        frozen = models["c"].module if isinstance(models["c"], ModelHandle) else models["c"]
        return {"a": (frozen(models["a"](batch["x"])) - batch["y"]).pow(2).mean()}

    plain, frozen, data = make_net(SEEDS["a"]), make_net(SEEDS["c"]).requires_grad_(False), make_data()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for indices in global_batches():
        batch = {key: torch.stack([data[index][key] for index in indices]) for key in ("x", "y")}
        through({"a": plain, "c": frozen}, batch)["a"].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for name, plugin in {"zero3": zero(3), "replicate": {"replicate": True}}.items():
        models = {"a": spec("a"), "c": ModelSpec(build=functools.partial(make_net, 3), trainable=False,
                                                 dtype=torch.float32)}  # fmt: skip
        trainer = fit(LossTask(through), {"a": zero(3), "c": plugin}, models)
        weights = weights_of(trainer)
        if trainer.is_main:
            found[name] = difference({"a": weights["a"]}, {"a": dict(plain.state_dict())})
    return found


def check_origins(folder: Path) -> dict[str, Any]:
    """A frozen c that starts from the trained a, which is built after it in the configuration's order."""

    class Start(Callback):
        def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
            self.weights = weights_of(trainer)

    found: dict[str, Any] = {}
    plugins: list[tuple[str, Any, Any]] = [
        ("replicate from zero3", {"replicate": True}, zero(3)),
        ("zero3 from zero1", zero(3), zero(1)),
        ("zero3 from zero3", zero(3), zero(3)),
    ]
    for name, frozen, trained in plugins:
        start = Start()
        models = {
            "c": ModelSpec(build=functools.partial(make_net, SEEDS["c"]), trainable=False, dtype=torch.float32,
                           init_from="a"),
            "a": spec("a"),
        }  # fmt: skip
        trainer = fit(LossTask(only("a")), {"c": frozen, "a": trained}, models, callbacks={"start": start})
        weights = weights_of(trainer)
        if trainer.is_main:
            found[name] = {
                "order": list(trainer.models),
                "equal at the start": difference({"a": start.weights["c"]}, {"a": start.weights["a"]}),
                "frozen moved": difference({"c": weights["c"]}, {"c": start.weights["c"]}),
                "trained moved": difference({"a": weights["a"]}, {"a": start.weights["a"]}),
            }
    small = ModelSpec(build=functools.partial(make_small, 2), trainable=False, dtype=torch.float32, init_from="a")
    try:
        fit(LossTask(only("a")), {"c": {"replicate": True}, "a": zero(1)}, {"c": small, "a": spec("a")})
    except ValueError as error:
        found["other shapes"] = str(error)
    return found


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def check_overflow(folder: Path) -> dict[str, Any]:
    """A finite loss of a with an infinite gradient, in the second step only; b must go on."""
    from trainer.callbacks import ModelMonitor

    logged: list[dict[str, float]] = []

    class Last(Callback):
        order = 100

        def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
            logged.append(dict(metrics))

    class Overflowing(TaskModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
            a, b = self.models["a"](batch["x"].bfloat16()), self.models["b"](batch["x"])
            if self.trainer.global_step == 1:
                a = InfiniteGradient.apply(a)
            return StepOutput(losses={"a": a.float().pow(2).mean(), "b": (b - batch["y"]).pow(2).mean()})

    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        logged.clear()
        trainer = fit(
            Overflowing(),
            {"a": zero(stage), "b": zero(2)},
            {"a": spec("a", dtype=torch.bfloat16), "b": spec("b")},
            steps=3,
            callbacks={"monitor": ModelMonitor(), "last": Last()},
            non_finite="skip",
        )
        found[f"zero{stage}"] = {
            "updates": {name: model.num_updates for name, model in trainer.models.items()},
            "skipped": {name: model.num_skipped for name, model in trainer.models.items()},
            "logged": [line.get("train/a/skipped_updates") for line in logged],
            "finite": all(bool(torch.isfinite(w).all()) for w in trainer.models["a"].local_weights()),
        }
    return found


def passes_through(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = models["a"](batch["x"])
    return {"a": models["b"](made).mean(), "b": models["b"](made.detach()).mean()}


def shares_a_forward(models: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = models["b"].module(models["a"](batch["x"])).exp()
    return {"a": made.mean(), "b": (models["b"](batch["x"]) * made).mean()}


def leaves_b_out(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": models["a"](batch["x"]).mean()}


def joint_without_b(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"joint": (models["a"](batch["x"]) * models["b"](batch["x"]).detach()).mean()}


def joint_and_own(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"joint": (models["a"](batch["x"]) * models["b"](batch["x"])).mean(), **disjoint(models, batch)}


def joint_through_own(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"joint": models["a"](models["b"](batch["x"])).mean(), "a": models["a"](batch["x"]).mean()}


def wrong_owner(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": models["b"](batch["x"]).mean(), "b": models["b"](batch["x"]).mean()}


def by_the_module(models: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": models["a"].module(batch["x"]).mean(), "b": models["b"](batch["x"]).mean()}


def without_graph(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": models["a"](batch["x"]).mean(), "b": models["b"](batch["x"]).detach().mean()}


def not_a_number(models: Mapping[str, Model], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    a, b = models["a"](batch["x"]), models["b"](batch["x"])
    return {"a": a.mean(), "b/first": b.mean(), "b/second": b.mean() * float("nan")}


def frozen_with_gradient(models: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    models["c"].module.requires_grad_(True)
    return disjoint(models, batch)


REFUSED = (
    passes_through, shares_a_forward, leaves_b_out, joint_without_b, joint_and_own, joint_through_own, wrong_owner,
    by_the_module, without_graph, not_a_number, frozen_with_gradient,
)  # fmt: skip


def check_refusals(folder: Path) -> dict[str, Any]:
    """Returns the error of each task that must not go on, with its notes, and the step in which it came."""
    found = {}
    for losses in REFUSED:
        for stages in ((1, 2), (3, 3), (0, 2)):
            plugins: dict[str, Any] = {"a": zero(stages[0]), "b": zero(stages[1])}
            models = {name: spec(name) for name in plugins}
            if losses is frozen_with_gradient:
                plugins["c"] = {"replicate": True}
                models["c"] = ModelSpec(build=functools.partial(make_net, 3), trainable=False, dtype=torch.float32)
            try:
                fit(LossTask(losses), plugins, models)
                found[f"{losses.__name__} {stages}"] = "went on"
            except (ValueError, RuntimeError) as error:
                found[f"{losses.__name__} {stages}"] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    try:
        windows = {"a": spec("a", gradient_accumulation_steps=1), "b": spec("b")}
        fit(LossTask(joint), {"a": zero(1), "b": zero(2)}, windows, accumulation=3)
    except ValueError as error:
        found["windows"] = str(error)
    return found


COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all_single",
)  # fmt: skip


class Collectives(Callback):
    """Counts those that the training takes, from the second step on."""

    def __init__(self) -> None:
        self.count = 0
        self._originals: dict[str, Any] = {}

    def on_train_step_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        if step == 2:
            for name in COLLECTIVES:
                self._originals[name] = getattr(torch.distributed, name)
                setattr(torch.distributed, name, functools.partial(self._counted, self._originals[name]))

    def _counted(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return original(*args, **kwargs)

    def on_train_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        for name, original in self._originals.items():
            setattr(torch.distributed, name, original)


def only(name: str) -> Callable[..., dict[str, Tensor]]:
    return lambda models, batch: {name: (models[name](batch["x"]) - batch["y"]).pow(2).mean()}


def check_reductions(folder: Path) -> dict[str, tuple[int, int]]:
    """Collectives of a window of 3 of a beside windows of 1 of b, and of the same two models in runs of their own."""
    found = {}
    for stages in ((1, 2), (2, 1), (3, 2), (0, 3)):
        together, slow, fast = Collectives(), Collectives(), Collectives()
        plugins = {"a": zero(stages[0]), "b": zero(stages[1])}
        models = {"a": spec("a"), "b": spec("b", gradient_accumulation_steps=1)}
        fit(LossTask(disjoint), plugins, models, accumulation=3, steps=3, callbacks={"count": together})
        fit(LossTask(only("a")), {"a": plugins["a"]}, {"a": spec("a")}, accumulation=3, steps=3,
            callbacks={"count": slow})  # fmt: skip
        fit(LossTask(only("b")), {"b": plugins["b"]}, {"b": spec("b")}, steps=7, callbacks={"count": fast},
            data=TrainingData(train=make_data(), batch_size=4))  # fmt: skip
        found[str(stages)] = (together.count, slow.count + fast.count)
    return found


class OwnDataTask(TaskModule):
    """Each model on its own examples; says which it saw."""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[float]]] = {"a": [], "b": []}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> StepOutput:
        losses = {}
        for name in ("a", "b"):
            part = self.batch_of(name, batch)
            self.seen[name].append(part["x"][:, 0].tolist())
            losses[name] = (self.models[name](part["x"]) - part["y"]).pow(2).mean()
        return StepOutput(losses=losses)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        parts = {name: self.batch_of(name, batch) for name in ("a", "b")}
        return {f"{name}/number": part["x"].mean() for name, part in parts.items()}


def numbers(first: int, count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.full((4,), float(first + i)), "y": torch.zeros(4)} for i in range(count)]


def check_own_data(folder: Path) -> dict[str, Any]:
    """a on 5 examples of its own, b on 7 shared ones: no size fits the window of 4."""
    from trainer import distributed

    task = OwnDataTask()
    size = 4 // distributed.world_size()
    trainer = fit(
        task,
        {"a": zero(1), "b": zero(3)},
        {
            "a": spec("a", optimizer="sgd", data=TrainingData(train=numbers(0, 5), validation=numbers(0, 5),
                                                              batch_size=size)),
            "b": spec("b"),
        },
        data=TrainingData(train=numbers(100, 7), validation=numbers(100, 11), batch_size=size),
        steps=5,
    )  # fmt: skip
    return {"seen": task.seen, "before": trainer.before, "updates": [m.num_updates for m in trainer.trained]}


CHECKS = {
    "gradients": check_gradients,
    "one rank": check_one_rank,
    "noise": check_noise,
    "plans": check_plans,
    "alternation": check_alternation,
    "document": check_document,
    "through frozen": check_through_frozen,
    "overflow": check_overflow,
    "origins": check_origins,
    "refusals": check_refusals,
    "own data": check_own_data,
    "reductions": check_reductions,
}


def run_checks(folder: Path, cases: list[Case]) -> dict[str, Any]:
    return {"cases": run_cases(cases), **{name: check(folder) for name, check in CHECKS.items()}}
