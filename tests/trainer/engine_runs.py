"""Runs of real engines, on one and on two ranks, and what each rank found; several tests read one run."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaForCausalLM

from tests.trainer.test_assets import tiny_llama
from tests.trainer.test_trainer import difference, reset_accelerate
from trainer import (
    Callback,
    ConfigError,
    ModelHandle,
    ModelSpec,
    MultiModelTrainer,
    StepOutput,
    TaskModule,
    TrainingData,
)
from trainer.engines import Plugin

LLAMA = tiny_llama().config
SEED = Path(__file__).parents[1] / "seed"
LR = 1e-2
SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
Found = dict[str, Any]


def zero(stage: int, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **block}}


# The pieces of a run


def make_net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 2))


def make_teacher() -> nn.Module:
    return make_net(2)


def random_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))  # from the trainer's seed


def net_data(count: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "y": torch.randn(2, generator=generator)} for _ in range(count)]


def token_data(count: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 200, (6,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class FitTask(TaskModule):
    """Every trained model fits the targets on its own."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        losses = {model.name: self.error(model, batch) for model in self.models.values() if model.trainable}
        return StepOutput(losses=losses)

    def error(self, model: ModelHandle, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"].to(model.dtype)).float() - batch["y"]).pow(2).mean()


class DistillTask(TaskModule):
    """The student's logits follow the teacher's."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        student, teacher = (self.models[name](input_ids=batch["input_ids"]).logits for name in ("student", "teacher"))
        return StepOutput(losses={"student": (student - teacher).float().pow(2).mean()})


class Probe(Callback):
    """Records what each model did at each update."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}
        self.norms: dict[str, list[float]] = {}
        self.steps: list[tuple[int, str]] = []

    def on_after_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        model = trainer.models[name]
        self.rates.setdefault(name, []).append(model.learning_rate())
        self.norms.setdefault(name, []).append(model.grad_norm())
        self.steps.append((trainer.global_step + 1, name))


class ActivePlugin(Callback):
    """Records the active plugin of Accelerate and of transformers in every hook."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def record(self, trainer: MultiModelTrainer, hook: str) -> None:
        from accelerate.utils import get_active_deepspeed_plugin
        from transformers.integrations import is_deepspeed_zero3_enabled

        active = get_active_deepspeed_plugin(trainer.accelerator.state)
        assert trainer.accelerator.state.deepspeed_plugin is active
        (name,) = (key for key, plugin in trainer.engines.plugins.items() if plugin is active)
        assert is_deepspeed_zero3_enabled() == (active.deepspeed_config["zero_optimization"]["stage"] == 3)
        self.seen.setdefault(hook, set()).add(name)

    def setup(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        self.record(trainer, "setup")

    def on_train_step_start(self, trainer: MultiModelTrainer, task: TaskModule, step: int) -> None:
        self.record(trainer, "on_train_step_start")

    def on_before_backward(self, trainer: MultiModelTrainer, task: TaskModule, name: str, loss: Tensor) -> None:
        self.record(trainer, f"on_before_backward {name}")

    def on_after_backward(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        self.record(trainer, f"on_after_backward {name}")

    def on_before_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        self.record(trainer, f"on_before_optimizer_step {name}")

    def on_after_optimizer_step(self, trainer: MultiModelTrainer, task: TaskModule, name: str) -> None:
        self.record(trainer, f"on_after_optimizer_step {name}")

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.record(trainer, "on_train_step_end")


def trained(build: Callable[..., nn.Module] = make_net, **fields: Any) -> ModelSpec:
    fields.setdefault("optimizer", functools.partial(torch.optim.AdamW, lr=LR))
    return ModelSpec(build=build, **{"dtype": torch.float32, **fields})


def frozen(build: Callable[..., nn.Module] = make_teacher, **fields: Any) -> ModelSpec:
    return ModelSpec(build=build, trainable=False, **{"dtype": torch.float32, **fields})


def fit(
    plugins: Mapping[str, Plugin],
    models: dict[str, ModelSpec],
    *,
    task: TaskModule | None = None,
    data: list[dict[str, Tensor]] | None = None,
    window: int = 16,
    **options: Any,
) -> MultiModelTrainer:
    """Returns a trainer that has run; a window holds `window` examples over all ranks."""
    reset_accelerate()
    trainer = MultiModelTrainer(plugins, log_every=1, **{"max_steps": 2, **options})
    batch_size = window // trainer.world_size // trainer.gradient_accumulation_steps
    trainer.fit(
        task or FitTask(), models=models, data=TrainingData(train=data or net_data(window), batch_size=batch_size)
    )
    return trainer


def whole_weights(trainer: MultiModelTrainer, name: str = "student") -> dict[str, Tensor]:
    from trainer.handle import gathered_state_dict

    return {key: value.float() for key, value in gathered_state_dict(trainer.models[name].module).items()}


def engine_of(trainer: MultiModelTrainer, name: str) -> tuple[str, int | None]:
    engine = trainer.models[name].engine
    return type(engine).__name__, trainer.models[name].stage


# Checks, run one after the other in each rank; each returns what its test looks at


def check_guide(folder: Path) -> Found:
    from accelerate.utils import DeepSpeedPlugin, get_active_deepspeed_plugin

    from trainer.models import causal_lm

    linear = nn.functional.linear
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=str(SEED / "zero2_config.json")),
        "teacher": DeepSpeedPlugin(hf_ds_config=str(SEED / "zero3_config.json")),
    }
    reset_accelerate()
    probe, active = Probe(), ActivePlugin()
    trainer = MultiModelTrainer(plugins, max_steps=6, callbacks={"probe": probe, "active": active})
    found: Found = {
        "first is active": get_active_deepspeed_plugin(trainer.accelerator.state) is plugins["student"],
    }
    llama = functools.partial(causal_lm, str(folder / "llama"))
    schedule = functools.partial(CosineAnnealingLR, T_max="auto", warmup_steps=4)
    models = {"student": trained(llama, scheduler=schedule), "teacher": frozen(llama)}
    batch_size = 8 // trainer.world_size
    trainer.fit(DistillTask(), models=models, data=TrainingData(train=token_data(8), batch_size=batch_size))
    student, teacher = trainer.models["student"], trainer.models["teacher"]
    return found | {
        "seen": active.seen,
        "rates": probe.rates["student"],
        "engines": [engine_of(trainer, name) for name in ("student", "teacher")],
        "zero": type(student.engine.optimizer).__name__,
        "optimizer": type(student.optimizer).__name__,
        "schedule": student.schedule,
        "first is active again": get_active_deepspeed_plugin(trainer.accelerator.state) is plugins["student"],
        "linear is torch's": nn.functional.linear is linear,
        "teacher is sharded": all(hasattr(parameter, "ds_id") for parameter in teacher.module.parameters()),
        "student is whole": not any(hasattr(parameter, "ds_id") for parameter in student.module.parameters()),
        "teacher bytes": teacher.local_bytes(),
        "student bytes": student.local_bytes(),
        "whole bytes": 4 * sum(parameter.numel() for parameter in tiny_llama().parameters()),
        "counts": (student.num_parameters, teacher.num_parameters),
        "config": plugins["student"].deepspeed_config,
    }


def check_birth(folder: Path) -> Found:
    """Sharded at birth or not, by the model's own plugin and no other's."""
    found: Found = {}

    def watched(name: str, seed: int = 1) -> nn.Module:
        net = make_net(seed)
        found[name] = [parameter.numel() for parameter in net.parameters()]
        return net

    models = {
        "sharded": frozen(functools.partial(watched, "sharded")),
        "replica": frozen(functools.partial(watched, "replica")),
        "student": trained(functools.partial(watched, "student")),
    }
    plugins = {"sharded": SHARDED, "replica": {"replicate": True}, "student": zero(2)}
    trainer = fit(plugins, models)
    found["bytes"] = {name: model.local_bytes() for name, model in trainer.models.items()}
    found["same answer"] = float((trainer.models["sharded"](X) - trainer.models["replica"](X)).abs().max())
    return found


X = torch.arange(8.0).reshape(2, 4) / 8


def check_gguf(folder: Path) -> Found:
    from trainer.models import causal_lm

    models = {
        "student": trained(functools.partial(causal_lm, str(folder / "llama"))),
        "teacher": frozen(functools.partial(causal_lm, str(folder / "tiny.gguf"))),
    }
    sharded = zero(3, stage3_prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
    trainer = fit({"student": zero(1), "teacher": sharded}, models, task=DistillTask(), data=token_data(), window=8)
    logits = trainer.models["teacher"](input_ids=token_data()[0]["input_ids"][None]).logits
    expected = tiny_llama()(token_data()[0]["input_ids"][None]).logits
    teacher = trainer.models["teacher"]
    return {
        "difference": float((logits - expected).abs().max()),
        "bytes": teacher.local_bytes(),
        "parameters": teacher.num_parameters,
    }


class Meddling(TaskModule):
    """Puts the teacher into training mode, where its dropout would act."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        teacher = self.models["teacher"]
        teacher.module.train()
        first, second = teacher(batch["x"]), teacher(batch["x"])
        self.seen = (teacher.module.training, bool((first == second).all()), first.requires_grad)
        return StepOutput(losses={"student": (self.models["student"](batch["x"]) - first).pow(2).mean()})


def noisy_net() -> nn.Module:
    return nn.Sequential(make_net(2), nn.Dropout(0.5))


class Vandal(Callback):
    """Changes one bit of a frozen weight."""

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        local = next(trainer.models["teacher"].local_weights())
        local.view(-1)[0] = torch.nextafter(local.view(-1)[0], torch.tensor(9.0))


def check_frozen(folder: Path) -> Found:
    found: Found = {}
    for name, plugin in {"replicate": {"replicate": True}, "zero3": SHARDED}.items():
        task = Meddling()
        plugins = {"student": zero(1), "teacher": plugin}
        trainer = fit(plugins, {"student": trained(), "teacher": frozen(noisy_net)}, task=task)
        found[f"{name} seen"] = task.seen
        weights, expected = whole_weights(trainer, "teacher"), noisy_net().state_dict()
        found[f"{name} equal"] = all(torch.equal(weights[key], expected[key]) for key in weights)
        found[f"{name} graph"] = any(
            parameter.requires_grad for parameter in trainer.models["teacher"].module.parameters()
        )
        try:
            fit(plugins, {"student": trained(), "teacher": frozen()}, callbacks={"vandal": Vandal()})
        except RuntimeError as error:
            found[f"{name} vandal"] = str(error)
    return found


def check_generation(folder: Path) -> Found:
    """Greedy answers of a ZeRO-3 model, a trained one too, with another plugin selected and a length per rank."""
    from trainer import distributed
    from trainer.models import causal_lm

    llama = functools.partial(causal_lm, str(folder / "llama"))
    asked = {
        "input_ids": token_data(2)[distributed.rank()]["input_ids"][None],
        "max_new_tokens": 2 + 6 * distributed.rank(),
    }
    trainer = fit(
        {"student": zero(2), "teacher": SHARDED, "actor": SHARDED},
        {"student": trained(llama), "teacher": frozen(llama), "actor": trained(llama)},
        task=GenerateTask(asked),
        data=token_data(),
        window=8,
    )
    expected = tiny_llama().generate(**asked, do_sample=False)
    return {
        "equal": torch.equal(trainer.task.answers[0], expected),  # type: ignore[attr-defined]
        "length": expected.shape[1],
        "training mode is back": trainer.models["actor"].module.training,
        "updates": trainer.models["actor"].num_updates,
    }


class GenerateTask(TaskModule):
    """Generates before each micro-batch, as on-policy methods do."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.answers = asked, []

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.models["student"].selected():
            self.answers.append(self.models["teacher"].generate(**self.asked, do_sample=False))
            self.models["actor"].generate(**self.asked, do_sample=False)
        return batch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        teacher = self.models["teacher"](input_ids=batch["input_ids"]).logits
        return StepOutput(
            losses={
                name: (self.models[name](input_ids=batch["input_ids"]).logits - teacher - 1).pow(2).mean()
                for name in ("student", "actor")
            }
        )


def check_gathering(folder: Path) -> Found:
    """Weights of a tied language model after two updates, gathered from ZeRO-1 and from ZeRO-3."""
    from trainer.handle import gathered_state_dict
    from trainer.models import causal_lm

    llama = functools.partial(causal_lm, str(folder / "llama"))
    states = {}
    for stage in (1, 3):
        plugins = {"student": zero(stage), "teacher": {"replicate": True}}
        sgd = functools.partial(torch.optim.SGD, lr=1e-3)
        models = {"student": trained(llama, optimizer=sgd), "teacher": frozen(other_llama)}
        trainer = fit(plugins, models, task=DistillTask(), data=token_data(), window=8)
        states[stage] = gathered_state_dict(trainer.models["student"].module)
    if not trainer.is_main:
        return {"elsewhere": [len(state) for state in states.values()]}
    alias = [
        state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr() for state in states.values()
    ]
    start = tiny_llama().state_dict()
    return {
        "difference": difference(states[3], states[1]),
        "moved": difference(states[1], start),
        "alias": alias,
        "keys": [set(state) == set(start) for state in states.values()],
    }


def other_llama() -> nn.Module:
    torch.manual_seed(5)
    return LlamaForCausalLM(LLAMA)


def check_freezing(folder: Path) -> Found:
    found: Found = {}
    start = make_net().state_dict()
    for stage in (0, 1, 2, 3):
        trainer = fit({"student": zero(stage)}, {"student": trained(freeze=["0.*"])})
        weights = whole_weights(trainer)
        found[f"zero{stage}"] = {key: not torch.equal(weights[key], start[key]) for key in weights}
        found[f"zero{stage} counts"] = (
            trainer.models["student"].num_trainable,
            trainer.models["student"].num_parameters,
        )
    return found


class StartWeights(Callback):
    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self.weights = whole_weights(trainer)


def check_start(folder: Path) -> Found:
    starts = {}
    for stage in (0, 1, 2, 3):
        start = StartWeights()
        fit({"student": zero(stage)}, {"student": trained(random_net)}, callbacks={"start": start}, seed=7)
        starts[stage] = start.weights
    start = StartWeights()
    fit({"student": zero(0)}, {"student": trained(random_net)}, callbacks={"start": start}, seed=8)
    llamas = {}
    for stage in (1, 3):
        llama = StartWeights()
        models = {"student": trained(tiny_llama), "teacher": frozen(tiny_llama)}
        plugins = {"student": zero(stage), "teacher": {"replicate": True}}
        fit(plugins, models, task=DistillTask(), data=token_data(), window=8, callbacks={"start": llama}, max_steps=1)
        llamas[stage] = llama.weights
    return {"starts": starts, "other seed": start.weights, "llamas": llamas}


def check_schedules(folder: Path) -> Found:
    probe = Probe()
    cosine = functools.partial(CosineAnnealingLR, T_max="auto")
    models = {
        "student": trained(scheduler=cosine),
        "other": trained(functools.partial(make_net, 3), scheduler=cosine,
                         optimizer=functools.partial(torch.optim.SGD, lr=0.5)),
    }  # fmt: skip
    trainer = fit({"student": zero(1), "other": zero(3)}, models, max_steps=5, callbacks={"probe": probe})
    return {
        "rates": probe.rates,
        "weights": whole_weights(trainer),
        "engines": [type(trainer.models[name].engine.optimizer).__name__ for name in ("student", "other")],
    }


class Batches(Callback):
    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: MultiModelTrainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


def check_windows(folder: Path) -> Found:
    """A model that steps twice in each window of four micro-batches, beside one that steps once."""
    probe, batches, active = Probe(), Batches(), ActivePlugin()
    cosine, sgd = functools.partial(CosineAnnealingLR, T_max="auto"), functools.partial(torch.optim.SGD, lr=0.1)
    models = {
        "slow": trained(optimizer=sgd, scheduler=cosine),
        "fast": trained(optimizer=sgd, scheduler=cosine, gradient_accumulation_steps=2),
    }
    trainer = fit(
        {"slow": zero(2), "fast": zero(3)},
        models,
        max_steps=3,
        gradient_accumulation_steps=4,
        callbacks={"probe": probe, "batches": batches, "active": active},
    )
    return {
        "steps": probe.steps,
        "rates": probe.rates,
        "batches": batches.batches,
        "weights": {name: whole_weights(trainer, name) for name in models},
        "updates": {name: model.num_updates for name, model in trainer.models.items()},
        "configs": {name: model.config for name, model in trainer.models.items()},
        "seen": active.seen,
    }


def check_norms(folder: Path) -> Found:
    found: Found = {}
    for stage in (0, 1, 2, 3):
        for clip in (None, 0.05):
            probe = Probe()
            sgd = functools.partial(torch.optim.SGD, lr=0.1)
            trainer = fit(
                {"student": zero(stage)},
                {"student": trained(max_grad_norm=clip, optimizer=sgd)},
                max_steps=3,
                gradient_accumulation_steps=2,
                callbacks={"probe": probe},
            )
            assert trainer.models["student"].engine.zero_optimization_stage() == stage
            found[f"zero{stage} clip {clip}"] = probe.norms["student"]
    return found


def check_bf16(folder: Path) -> Found:
    found: Found = {}
    start = make_net().state_dict()
    for stage in (0, 1, 2, 3):
        probe = Probe()
        # the plugin alone says the type
        plugin = {**zero(stage), "bf16": {"enabled": True}}
        trainer = fit({"student": plugin}, {"student": trained(dtype=None)}, callbacks={"probe": probe})
        weights = whole_weights(trainer)
        found[f"zero{stage}"] = {
            "dtype": trainer.models["student"].dtype,
            "moved": difference(weights, start) if weights else None,
            "finite": all(math.isfinite(norm) for norm in probe.norms["student"]),
        }
    return found


def no_module() -> Any:
    return {}


def check_refusals(folder: Path) -> Found:
    """Returns the message of each run that must not start."""
    two = {"student": trained(), "teacher": frozen()}
    runs: dict[str, tuple[Mapping[str, Plugin], dict[str, ModelSpec], dict[str, Any]]] = {
        "fp16": ({"student": zero(1)}, {"student": trained(dtype=torch.float16)}, {}),
        "frozen zero2": ({"student": zero(1), "teacher": zero(2)}, two, {}),
        "offload": ({"student": zero(2, offload_optimizer={"device": "cpu"})}, {"student": trained()}, {}),
        "no optimizer": ({"student": zero(2)}, {"student": trained(optimizer=None)}, {}),
        "window": (
            {"student": zero(2)},
            {"student": trained(gradient_accumulation_steps=3)},
            {"gradient_accumulation_steps": 4},
        ),
        "batch": ({"student": {**zero(2), "train_batch_size": 7}}, {"student": trained()}, {}),
        "no module": ({"student": zero(2)}, {"student": trained(no_module)}, {}),
        "all frozen": ({"student": zero(2)}, {"student": trained(freeze=["*"])}, {}),
        "no model": ({"student": zero(2), "teacher": SHARDED}, {"student": trained()}, {}),
    }  # fmt: skip
    found = {}
    for name, (plugins, models, options) in runs.items():
        try:
            fit(plugins, models, **options)
        except ConfigError as error:
            found[name] = str(error)
    return found


def check_plugin_objects(folder: Path) -> Found:
    """Accelerate's own defaults, where accumulation is not given, and a frozen model under an offload preset."""
    from accelerate.utils import DeepSpeedPlugin

    offloaded = zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu", "pin_memory": "auto"})
    trainer = fit(
        {"student": DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5), "teacher": offloaded},
        {"student": trained(), "teacher": frozen()},
        gradient_accumulation_steps=4,
    )
    student = trainer.models["student"]
    return {"accumulation": student.config["gradient_accumulation_steps"], "clip": student.config["gradient_clipping"],
            "stages": [model.stage for model in trainer.models.values()]}  # fmt: skip


CHECKS: dict[str, Callable[[Path], Found]] = {
    "guide": check_guide,
    "birth": check_birth,
    "gguf": check_gguf,
    "frozen": check_frozen,
    "generation": check_generation,
    "gathering": check_gathering,
    "freezing": check_freezing,
    "start": check_start,
    "schedules": check_schedules,
    "windows": check_windows,
    "norms": check_norms,
    "bf16": check_bf16,
    "refusals": check_refusals,
    "plugin objects": check_plugin_objects,
}


def run_checks(folder: Path) -> dict[str, Found]:
    """Runs every check in this rank."""
    os.environ["TRAINER_CACHE"] = str(folder / "cache")
    found = {}
    for name, check in CHECKS.items():
        found[name] = check(folder)
    return found


class Ranks:
    """What each rank found, by check."""

    def __init__(self, world_size: int, found: list[dict[str, Found]]) -> None:
        self.world_size, self.found = world_size, found

    def __call__(self, check: str) -> list[Found]:
        return [rank[check] for rank in self.found]
