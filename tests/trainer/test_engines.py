"""Engines on one and on two ranks: whose plugin is active, what is sharded, what steps when, and at which rate."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaForCausalLM

from tests.ranks import run_ranks
from tests.trainer.test_assets import tiny_llama, write_gguf
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


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("engines")
    tiny_llama().save_pretrained(folder / "llama")
    write_gguf(tiny_llama(), folder / "tiny.gguf", with_tokenizer=False)
    return Ranks(request.param, run_ranks(run_checks, folder, folder=folder, world_size=request.param))


# The guide's own form


def test_guide_files_give_the_engines_they_name(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["engines"] == [("DeepSpeedEngine", 2), ("DeepSpeedEngine", 3)]
        assert found["zero"] == "DeepSpeedZeroOptimizer"
        assert (found["optimizer"], found["schedule"]) == ("AdamW", "WarmupLR")
        assert found["config"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_first_plugin_is_active_after_construction_and_after_the_run(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["first is active"]
        assert found["first is active again"]


def test_active_plugin_within_a_hook_is_that_of_the_model_concerned(ranks: Ranks) -> None:
    hooks = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_after_optimizer_step")
    for found in ranks("windows"):  # the first plugin is "slow"
        expected = {f"{hook} {name}": {name} for hook in hooks for name in ("slow", "fast")}
        everywhere = {hook: {"slow"} for hook in ("setup", "on_train_step_start", "on_train_step_end")}
        assert found["seen"] == expected | everywhere
    for found in ranks("guide"):
        assert set().union(*found["seen"].values()) == {"student"}


def test_warmup_of_the_file_is_linear_to_the_tasks_rate(ranks: Ranks) -> None:
    # DeepSpeed's WarmupLR starts at the minimum and takes its first step after the first update: 0, 0, 1/4, 2/4...
    for found in ranks("guide"):
        assert found["rates"] == pytest.approx([0, 0, LR / 4, LR / 2, LR * 3 / 4, LR])


def test_teacher_of_the_guide_is_sharded_and_the_student_whole(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["teacher is sharded"]
        assert found["student is whole"]
        assert found["student bytes"] == found["whole bytes"]
        # 38 tensors, each padded to a multiple of the ranks
        share = found["whole bytes"] / ranks.world_size
        assert share <= found["teacher bytes"] <= share + 38 * 4
        assert found["counts"][0] == found["counts"][1] == found["whole bytes"] // 4


def test_linear_is_not_patched_by_a_sharded_teacher(ranks: Ranks) -> None:
    assert all(found["linear is torch's"] for found in ranks("guide"))


# Building


def test_model_is_sharded_at_birth_by_its_own_plugin_only(ranks: Ranks) -> None:
    whole = [parameter.numel() for parameter in make_net().parameters()]
    for found in ranks("birth"):
        assert found["sharded"] == [0, 0, 0, 0]  # nothing but partitions is left when the builder returns
        assert found["replica"] == found["student"] == whole
        assert found["bytes"]["replica"] == found["bytes"]["student"] == 4 * sum(whole)
        assert found["bytes"]["sharded"] == 4 * sum(whole) / ranks.world_size
        assert found["same answer"] == 0


def test_gguf_file_works_under_zero3(ranks: Ranks) -> None:
    parameters = sum(parameter.numel() for parameter in tiny_llama().parameters())
    for found in ranks("gguf"):
        assert found["difference"] < 1e-5
        assert found["parameters"] == parameters
        assert found["bytes"] <= 4 * parameters / ranks.world_size + 38 * 4


def test_same_seed_gives_the_same_start_under_every_stage(ranks: Ranks) -> None:
    found = ranks("start")[0]
    for stage in (1, 2, 3):
        assert all(torch.equal(found["starts"][stage][key], value) for key, value in found["starts"][0].items())
    assert difference(found["other seed"], found["starts"][0]) > 0.01


def test_transformers_class_starts_from_its_own_distribution_when_sharded_at_birth(ranks: Ranks) -> None:
    # Its constructor initializes at the end, when ZeRO-3 has taken the weights away.
    llamas = ranks("start")[0]["llamas"]

    for name, value in llamas[1].items():
        torch.testing.assert_close(llamas[3][name].std(), value.std(), rtol=0.1, atol=0)
    assert not llamas[3]["model.embed_tokens.weight"][2].any()  # the padding token


def test_frozen_patterns_keep_their_start_and_the_rest_moves(ranks: Ranks) -> None:
    found = ranks("freezing")[0]
    for stage in (0, 1, 2, 3):
        assert found[f"zero{stage}"] == {"0.weight": False, "0.bias": False, "3.weight": True, "3.bias": True}
        assert found[f"zero{stage} counts"] == (8 * 2 + 2, 4 * 8 + 8 + 8 * 2 + 2)


# Frozen models


@pytest.mark.parametrize("plugin", ["replicate", "zero3"])
def test_frozen_model_stays_in_eval_mode_without_a_graph(ranks: Ranks, plugin: str) -> None:
    for found in ranks("frozen"):
        assert found[f"{plugin} seen"] == (False, True, False)
        assert not found[f"{plugin} graph"]


@pytest.mark.parametrize("plugin", ["replicate", "zero3"])
def test_frozen_weights_do_not_change_and_a_changed_bit_is_reported(ranks: Ranks, plugin: str) -> None:
    assert ranks("frozen")[0][f"{plugin} equal"]
    for found in ranks("frozen"):
        assert "the weights of the frozen model 'teacher' changed" in found[f"{plugin} vandal"]


# Generation and gathering


def test_sharded_models_generate_with_another_plugin_selected_and_different_lengths(ranks: Ranks) -> None:
    found = ranks("generation")

    assert all(rank["equal"] for rank in found)
    assert len({rank["length"] for rank in found}) == ranks.world_size
    assert all(rank["training mode is back"] for rank in found)
    assert all(rank["updates"] == 2 for rank in found)  # a trained one goes on training after it


def test_gathered_weights_do_not_depend_on_the_stage_and_stay_tied(ranks: Ranks) -> None:
    main, *others = ranks("gathering")

    assert main["moved"] > 1e-4
    assert main["difference"] < 1e-6
    assert main["alias"] == [True, True]
    assert main["keys"] == [True, True]
    assert all(found["elsewhere"] == [0, 0] for found in others)


# Stepping


def plain_fit(
    updates: list[dict[str, Tensor]], optimizer: Callable[..., torch.optim.Optimizer], *, clip: float | None = None
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Returns the weights, rates and norms of plain PyTorch: one update for each batch, a cosine over all of them."""
    net = make_net()
    steps = optimizer(net.parameters())
    schedule = CosineAnnealingLR(steps, T_max=len(updates))
    rates, norms = [], []
    for batch in updates:
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip if clip is not None else math.inf)))
        rates.append(steps.param_groups[0]["lr"])
        steps.step()
        steps.zero_grad()
        schedule.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}, rates, norms


def stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def concatenate(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def test_rates_and_weights_of_five_adam_updates_are_plain_torchs(ranks: Ranks) -> None:
    weights, rates, _ = plain_fit([stack(net_data())] * 5, functools.partial(torch.optim.AdamW, lr=LR))

    for found in ranks("schedules"):
        assert found["engines"] == ["DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"]
        assert found["rates"]["student"] == pytest.approx(rates)
        assert found["rates"]["other"] == pytest.approx([rate * 0.5 / LR for rate in rates])
    # Adam divides by the gradient's size: rounding of 1e-7 becomes up to 1e-5 where a gradient is near 0.
    assert difference(ranks("schedules")[0]["weights"], weights) < 1e-5


def test_model_with_a_smaller_accumulation_steps_several_times_per_window(ranks: Ranks) -> None:
    for found in ranks("windows"):
        once = [(step, name) for step in (1, 2, 3) for name in ("fast", "slow", "fast")]
        assert found["updates"] == {"slow": 3, "fast": 6}
        assert sorted(found["steps"]) == sorted(once)
        assert [name for _, name in found["steps"][:3]] == ["fast", "slow", "fast"]
        assert [found["configs"][name]["gradient_accumulation_steps"] for name in ("slow", "fast")] == [4, 2]


@pytest.mark.parametrize(("model", "per_update"), [("slow", 4), ("fast", 2)])
def test_each_models_update_is_the_mean_over_its_own_micro_batches(ranks: Ranks, model: str, per_update: int) -> None:
    found = ranks("windows")
    updates = [
        concatenate([batch for rank in found for batch in rank["batches"][first : first + per_update]])
        for first in range(0, 12, per_update)
    ]
    weights, rates, _ = plain_fit(updates, functools.partial(torch.optim.SGD, lr=0.1))

    assert difference(found[0]["weights"][model], weights) < 1e-6
    assert found[0]["rates"][model] == pytest.approx(rates)  # a cosine over its own number of updates


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reported_norm_is_that_before_clipping(ranks: Ranks, stage: int, clip: float | None) -> None:
    constant = functools.partial(torch.optim.SGD, lr=0.1)
    net, norms = make_net(), []
    optimizer, batch = constant(net.parameters()), stack(net_data())
    for _ in range(3):
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()

    for found in ranks("norms"):
        assert found[f"zero{stage} clip {clip}"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_of_the_plugin_trains_a_bf16_model(ranks: Ranks, stage: int) -> None:
    for found in ranks("bf16"):
        assert found[f"zero{stage}"]["dtype"] == torch.bfloat16
        assert found[f"zero{stage}"]["finite"]
    # Two updates of Adam move a weight by about 2 LR.
    assert LR / 2 < ranks("bf16")[0][f"zero{stage}"]["moved"] < 4 * LR


def test_plugin_object_without_an_accumulation_follows_the_run(ranks: Ranks) -> None:
    for found in ranks("plugin objects"):
        assert found == {"accumulation": 4, "clip": 0.5, "stages": [2, 3]}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("fp16", "models.student.dtype=float16 does not exist on a CPU"),
        ("frozen zero2", "is ZeRO-2, but models.teacher is frozen"),
        ("offload", "models.student.optimizer is AdamW, but models.student.plugin offloads the optimizer"),
        ("no optimizer", "models.student is trainable but has no optimizer"),
        ("window", "gradient_accumulation_steps=3 must divide trainer.gradient_accumulation_steps=4"),
        ("batch", "models.student.plugin.train_batch_size=7, but the run's is 16"),
        ("no module", "models.student.build must return a torch.nn.Module, but returned dict"),
        ("all frozen", "models.student is trainable, but none of its parameters requires a gradient"),
        ("no model", "'teacher' has no model"),
    ],
)
def test_run_that_cannot_be_is_refused_with_the_reason(ranks: Ranks, run: str, reason: str) -> None:
    for found in ranks("refusals"):
        assert reason in found[run]


# DeepSpeed's CPU optimizer, compiled at first use


def check_offload(folder: Path) -> Found:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    found: Found = {}
    for name, block in {
        "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}},
        "zero3_offload": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
            "offload_param": {"device": "cpu", "pin_memory": "auto"},
        },
    }.items():
        optimizer = functools.partial(DeepSpeedCPUAdam, lr=LR, adamw_mode=True, weight_decay=0.01)
        trainer = fit({"student": {"zero_optimization": block}}, {"student": trained(optimizer=optimizer)}, max_steps=5)
        found[name] = (type(trainer.models["student"].optimizer).__name__, whole_weights(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_adam_is_torchs(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(check_offload, tmp_path, folder=tmp_path, world_size=world_size, timeout=600)[0]

    net, batch = make_net(), stack(net_data())
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01)
    for _ in range(5):
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, (kind, weights) in found.items():
        assert kind == "DeepSpeedCPUAdam", name
        assert difference(weights, dict(net.named_parameters())) < 1e-5, name
