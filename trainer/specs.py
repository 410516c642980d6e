"""What a run's models are, as the trainer is given them, and what makes one impossible."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer import distributed
from trainer.adapters import check_lora
from trainer.config import ConfigError
from trainer.data.sources import TrainingData
from trainer.plugin_keys import AUTO
from trainer.plugins import Config, Facts, check_plugin, stage_of, uses_engine
from trainer.quantization import find_quantization_problems
from trainer.task import TaskModule, find_task_problems
from trainer.updates import UpdatePlan, find_idle_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ModelSpec:
    """How one model is made and trained.

    Args:
        build: Returns the module; one with a parameter `dtype` is given the model's.
        dtype: None: the plugin's, if it fixes one; else bfloat16 where the hardware computes in it, else float32.
        optimizer: Called with the trainable parameters; a partial's keywords also fill the `auto`s of the plugin.
        scheduler: Called with the optimizer; a partial's keywords that are "auto" become the number of updates.
        gradient_accumulation_steps: Micro-batches per update; None: the trainer's.
        plan: The windows in which the model's losses count.
        data: Examples of its own; None: those that all models share.
        tokenizer: The one whose token ids it reads, where a task translates for it; None: that of its examples.
        init_from: The model whose start weights this one takes; None: those of its own build.
        freeze: Globs of parameter names that keep their start value.
        lora: Settings of peft.LoraConfig; None or empty: no adapters.
    """

    build: Callable[..., nn.Module]
    trainable: bool = True
    dtype: torch.dtype | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int | None = None
    plan: UpdatePlan = field(default_factory=UpdatePlan)
    data: TrainingData | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    init_from: str | None = None
    freeze: list[str] = field(default_factory=list)
    lora: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class RunFacts:
    """What all models of a run share."""

    batch_size: int
    accumulation: int
    num_steps: int
    seed: int
    last_step: int | None = None  # where it ends before that, for now
    trains: bool = True


def check_task(task: TaskModule, models: Mapping[str, ModelSpec], *, stage: str, accumulation: int = 1) -> None:
    """Raises ConfigError with what is wrong with a run's models for a task, before any of them is built.

    Args:
        accumulation: The trainer's, for models without their own.
    """
    problems = find_task_problems(
        task,
        trainable={name: spec.trainable for name, spec in models.items()},
        own_data=[name for name, spec in models.items() if spec.data is not None],
        stage=stage,
        adapted=[name for name, spec in models.items() if spec.lora],
        accumulation={name: spec.gradient_accumulation_steps or accumulation for name, spec in models.items()},
    )
    if problems:
        raise ConfigError(*problems)


def check_spec(name: str, spec: ModelSpec, config: Config, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Returns what makes a model impossible under its plugin's configuration."""
    optimizer = name_of(spec.optimizer) if spec.optimizer is not None else None
    problems = check_plugin(name, config, trainable=spec.trainable, optimizer=optimizer)
    if spec.trainable and optimizer is None and "optimizer" not in config:
        problems.append(f"models.{name} is trainable but has no optimizer; give ModelSpec(optimizer=...)")
    problems += check_lora(
        f"models.{name}", spec.lora or {}, trainable=spec.trainable, freeze=spec.freeze, stage=stage_of(config)
    )
    problems += find_quantization_problems(
        f"models.{name}",
        quantization_of(spec),
        trainable=spec.trainable,
        has_engine=uses_engine(config),
        init_from=spec.init_from,
    )
    if dtype == torch.float16 and device.type == "cpu":
        problems.append(f"models.{name}.dtype=float16 does not exist on a CPU in DeepSpeed; use float32 or bfloat16")
    return problems


def check_window(name: str, spec: ModelSpec, run: RunFacts) -> list[str]:
    """Returns what is wrong with the windows in which a model is updated."""
    problems = spec.plan.find_problems(name, run.num_steps if run.trains else None) if spec.trainable else []
    if not spec.trainable and spec.plan != UpdatePlan():
        problems.append(
            f"models.{name} is frozen, so update_every, start_step and freeze_after mean nothing; drop them"
        )
    steps = spec.gradient_accumulation_steps
    if steps is not None and (steps < 1 or run.accumulation % steps):
        window = f"trainer.gradient_accumulation_steps={run.accumulation}"
        problems.append(f"models.{name}.gradient_accumulation_steps={steps} must divide {window}")
    return problems


def tell_idle(models: Mapping[str, ModelSpec], run: RunFacts) -> None:
    """Warns of a step that updates no model."""
    step = find_idle_step([spec.plan for spec in models.values() if spec.trainable], run.num_steps)
    if step is not None:
        log.warning("step %d updates no model, by update_every, start_step and freeze_after of all; is it meant?", step)


def tell_unreached(models: Mapping[str, ModelSpec], configs: Mapping[str, Config], run: RunFacts) -> None:
    """Warns of a model that is trained for less than its settings promise: no update, or no end of its warm-up.

    Args:
        configs: By model, its plugin's, which may bring a schedule of its own.
    """
    for name, spec in models.items():
        if not spec.trainable:
            continue
        if run.last_step is not None and spec.plan.first_step > run.last_step:
            log.warning(
                "trainer.stop_at_step=%d: the run ends before the first update of models.%s, which is in step %d",
                run.last_step, name, spec.plan.first_step,
            )  # fmt: skip
        key, warmup = _warmup_of(name, spec, configs[name])
        updates = _num_updates(spec, run)
        if isinstance(warmup, (int, float)) and warmup > updates:
            log.warning(
                "%s=%g: the run has %d updates of models.%s, so its learning rate ends at %.0f %% of the peak; lower "
                "it, give a share such as 0.05, or lengthen the run",
                key, warmup, updates, name, 100 * updates / warmup,
            )  # fmt: skip


def _warmup_of(name: str, spec: ModelSpec, config: Config) -> tuple[str, Any]:
    """Returns how long a model's rate rises, as it is given, and where; None if its schedule says nothing of that."""
    if config.get("scheduler") is not None:
        given = (config["scheduler"].get("params") or {}).get("warmup_num_steps")
        if given != AUTO:
            return f"models.{name}.plugin.scheduler.params.warmup_num_steps", given
    return f"models.{name}.scheduler.warmup_steps", keywords_of(spec.scheduler).get("warmup_steps")


def _num_updates(spec: ModelSpec, run: RunFacts) -> int:
    accumulation = spec.gradient_accumulation_steps or run.accumulation
    return spec.plan.num_windows(run.num_steps) * (run.accumulation // accumulation)


def facts_of(spec: ModelSpec, run: RunFacts, dtype: torch.dtype, device: torch.device) -> Facts:
    """Returns what fills the `auto`s of a model's plugin."""
    accumulation = spec.gradient_accumulation_steps or run.accumulation
    return Facts(
        micro_batch=spec.data.batch_size if spec.data is not None else run.batch_size,
        accumulation=accumulation,
        world_size=distributed.world_size(),
        dtype=dtype,
        trainable=spec.trainable,
        max_grad_norm=spec.max_grad_norm,
        num_updates=_num_updates(spec, run),
        optimizer=keywords_of(spec.optimizer),
        scheduler=keywords_of(spec.scheduler),
        on_gpu=device.type == "cuda",
    )


def build_module(build: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    """Returns what a build makes, which is told the dtype if it takes one."""
    return build(dtype=dtype) if "dtype" in inspect.signature(build).parameters else build()


def quantization_of(spec: ModelSpec) -> Any:
    """Returns the `quantization` that its build is given, None without."""
    return keywords_of(spec.build).get("quantization")


def name_of(maker: Any) -> str:
    """Returns the name of a function, a partial of one, or an object's class; "constant" for none."""
    function = maker.func if isinstance(maker, functools.partial) else maker
    return "constant" if function is None else str(getattr(function, "__name__", type(function).__name__))


def keywords_of(function: Any) -> Mapping[str, Any]:
    """Returns the keywords of a partial, {} of another function."""
    return function.keywords if isinstance(function, functools.partial) else {}
