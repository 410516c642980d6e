"""DeepSpeed configurations of the models: read, checked, and every `auto` resolved to a plain value."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson
import torch

from trainer.config import ConfigError
from trainer.plugin_keys import AUTO, check_keys

Config = dict[str, Any]

log = logging.getLogger(__name__)

REPLICATE = "replicate"  # the whole plugin of a frozen model without an engine
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

RUN_KEYS = (*BATCH_KEYS, "gradient_clipping")  # resolved one by one

# Optimizers whose step DeepSpeed runs on the CPU; any other one would be slow, or be replaced without a word.
OFFLOAD_OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")


@dataclass(kw_only=True)
class Facts:
    """What `auto` values of one model follow from."""

    micro_batch: int
    accumulation: int
    world_size: int
    dtype: torch.dtype
    trainable: bool
    max_grad_norm: float | None = None
    num_updates: int = 1
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # lr, betas, eps, weight_decay... of the task
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # warmup_steps... of the task
    hidden_size: int | None = None  # known once the model is built
    on_gpu: bool = False

    def warmup_updates(self) -> int:
        """Returns the number of updates the schedule warms up for; a share of them below 1."""
        warmup = self.scheduler.get("warmup_steps", 0)
        return max(1, int(round(warmup * self.num_updates if 0 < warmup < 1 else warmup)))  # noqa: RUF046 - YAML's Any


# Reading ------------------------------------------------------------------------------------------------------------


def read_plugin(key: str, plugin: Mapping[str, Any] | str | Path) -> Config:
    """Returns the DeepSpeed configuration of a preset's node, a dict, or the path of a JSON file.

    Args:
        key: Where the plugin stands, for errors: models.student.plugin.
    """
    if isinstance(plugin, (str, Path)):
        return _read_file(key, Path(plugin))
    config = copy.deepcopy(dict(plugin))
    if "path" not in config:
        return config
    path = config.pop("path")
    return _merge(_read_file(f"{key}.path", Path(path)), config)


def _read_file(key: str, path: Path) -> Config:
    if not path.is_file():
        raise ConfigError(f"{key}={path} is no file; give the path of a DeepSpeed JSON, relative to {Path.cwd().name}/")
    try:
        # hjson, as in DeepSpeed itself: takes comments and trailing commas.
        loaded = hjson.loads(path.read_text(), object_pairs_hook=_refuse_duplicates)
    except (hjson.HjsonDecodeError, ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path} is no valid DeepSpeed JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{key}={path} must hold a JSON object, but holds a {type(loaded).__name__}")
    return loaded


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"key '{repeated[0]}' stands twice in one object")
    return dict(pairs)


def _merge(base: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    return base


def uses_engine(config: Mapping[str, Any]) -> bool:
    """Returns whether the model gets a DeepSpeed engine."""
    return not config.get(REPLICATE, False)


def stage_of(config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the data type that the plugin itself fixes, None where it leaves that open."""
    enabled = {block: (config.get(block) or {}).get("enabled", AUTO) for block in ("bf16", "fp16")}
    if enabled["bf16"] is True:
        return torch.bfloat16
    if enabled["fp16"] is True:
        return torch.float16
    return torch.float32 if enabled["bf16"] is False else None


# Checking -----------------------------------------------------------------------------------------------------------


def check_plugin(name: str, plugin: Mapping[str, Any], *, trainable: bool, optimizer: str | None) -> list[str]:
    """Returns every problem of one model's plugin: unknown keys, wrong types, illegal combinations.

    Args:
        optimizer: Name of the optimizer's class that the task gives, None for none.
    """
    key = f"models.{name}.plugin"
    try:
        config = read_plugin(key, plugin)
    except ConfigError as error:
        return error.problems
    if not config and plugin.get("path"):
        return [f"{key}.path={plugin['path']} holds nothing; give a zero_optimization block with a stage, at least"]
    if not config:
        return [f"{key} is missing; choose one: plugin@{key}=zero2 (frozen models: replicate or zero3_inference)"]
    if not uses_engine(config):
        return _check_replicate(key, name, config, trainable)
    problems = check_keys(key, config)
    if not problems:
        problems = list(_check_combination(key, name, config, trainable, optimizer)) + _unresolvable(key, config)
    return problems


def check_plugins(models: Mapping[str, Mapping[str, Any]], overrides: list[str]) -> list[str]:
    """Returns every problem of all models' plugins.

    Args:
        models: `models` of the configuration, as plain containers.
        overrides: The command line's, to tell an optimizer that the user asked for from a task's default.
    """
    problems: list[str] = []
    for name, model in models.items():
        target = (model.get("optimizer") or {}).get("_target_")
        optimizer = str(target).rpartition(".")[2] if target else None
        plugin = model.get("plugin") or {}
        found = check_plugin(name, plugin, trainable=model.get("trainable", True), optimizer=optimizer)
        problems += found
        if not found:
            problems += _check_twice_given(name, read_plugin(f"models.{name}.plugin", plugin), overrides)
    return problems


def _check_twice_given(name: str, config: Config, overrides: list[str]) -> Iterator[str]:
    for part in ("optimizer", "scheduler"):
        chosen = [text for text in overrides if text.startswith(f"{part}@models.{name}.{part}=")]
        if part in config and chosen:
            yield (
                f"{chosen[0]} and the '{part}' block of models.{name}.plugin both choose the {part}; "
                f"drop one of them (`~models.{name}.plugin.{part}` drops the block of a preset)"
            )


def _check_replicate(key: str, name: str, config: Config, trainable: bool) -> list[str]:
    if trainable:
        return [
            (
                f"{key}=replicate has no engine, but models.{name} is trained; "
                f"choose plugin@{key}=zero0, zero1, zero2 or zero3, or set models.{name}.trainable=false"
            )
        ]
    extra = sorted(set(config) - {REPLICATE})
    return (
        [f"{key}.{extra[0]} has no effect beside replicate=true; choose plugin@{key}=zero3_inference"] if extra else []
    )


def _check_combination(key: str, name: str, config: Config, trainable: bool, optimizer: str | None) -> Iterator[str]:
    stage, parallel = stage_of(config), config.get("sequence_parallel_size", 1)
    if parallel != 1:
        yield f"{key}.sequence_parallel_size={parallel} is not supported: each rank reads rows of its own; drop it"
    if not trainable and stage != 3:
        yield (
            f"{key} is ZeRO-{stage}, but models.{name} is frozen: stages 0 to 2 shard or reduce for an optimizer, "
            f"which a frozen model lacks; choose plugin@{key}=zero3_inference (sharded) or replicate (one per rank)"
        )
        return
    zero = config.get("zero_optimization") or {}
    if _offloads(zero, "offload_param") and stage != 3:
        yield f"{key}.zero_optimization.offload_param needs stage 3, but the stage is {stage}"
    if not trainable:
        return
    if _offloads(zero, "offload_optimizer") and stage == 0:
        yield f"{key}.zero_optimization.offload_optimizer needs stage 1, 2 or 3, but the stage is 0"
    if _offloads(zero, "offload_optimizer") and "optimizer" not in config:
        yield from _check_offloaded_optimizer(key, name, config, optimizer)


def _check_offloaded_optimizer(key: str, name: str, config: Config, optimizer: str | None) -> Iterator[str]:
    if optimizer is None or optimizer in OFFLOAD_OPTIMIZERS or config.get("zero_force_ds_cpu_optimizer") is False:
        return
    yield (
        f"models.{name}.optimizer is {optimizer}, but {key} offloads the optimizer to the CPU, where DeepSpeed takes "
        f"only its own (and Accelerate would put DeepSpeedCPUAdam in its place without a word); choose "
        f"optimizer@models.{name}.optimizer=cpu_adamw, or keep {optimizer} (slower) with "
        f"{key}.zero_force_ds_cpu_optimizer=false"
    )


def _unresolvable(key: str, config: Config) -> list[str]:
    """Returns the problems of the `auto`s that no run says the value of."""
    node, problems = copy.deepcopy({name: config[name] for name in config if name not in RUN_KEYS}), list[str]()
    facts = Facts(
        micro_batch=1, accumulation=1, world_size=1, dtype=torch.float32, trainable=True, optimizer={"lr": 1.0}
    )
    _replace_autos(key, node, "", _autos(node, facts), problems)
    return problems


def _offloads(zero: Mapping[str, Any], block: str) -> bool:
    return (zero.get(block) or {}).get("device", "none") not in ("none", None, AUTO)


# Resolving ----------------------------------------------------------------------------------------------------------


def resolve(key: str, config: Mapping[str, Any], facts: Facts) -> Config:
    """Returns the configuration with every `auto` replaced and everything that DeepSpeed defaults badly written out.

    Raises ConfigError for an `auto` that nothing says the value of, and for a batch key that differs from the run's.
    """
    resolved: Config = {name: copy.deepcopy(value) for name, value in config.items() if value is not None}
    _set_batch(key, resolved, facts)
    _set_dtype(key, resolved, facts)
    zero = resolved.setdefault("zero_optimization", {})
    zero["stage"] = stage_of(resolved)
    # True patches torch.nn.functional.linear for every model of the process.
    zero["memory_efficient_linear"] = False
    clipping = resolved.get("gradient_clipping", AUTO)
    resolved["gradient_clipping"] = (facts.max_grad_norm or 0.0) if clipping == AUTO else clipping
    resolved.setdefault("steps_per_print", 2**31 - 1)
    resolved.setdefault("zero_allow_untested_optimizer", True)  # all of torch's work; the tests hold it
    if not facts.trainable:
        for block in ("optimizer", "scheduler"):
            resolved.pop(block, None)
    if str(resolved.get("scheduler", {}).get("type", "")).startswith("Warmup"):
        # DeepSpeed's own default is "log", which is not what anyone expects of a warmup
        resolved["scheduler"]["params"] = {"warmup_type": "linear", **(resolved["scheduler"].get("params") or {})}
    if _would_compile_adam(resolved, facts):
        resolved["optimizer"]["params"] = {**(resolved["optimizer"].get("params") or {}), "torch_adam": True}
    problems: list[str] = []
    _replace_autos(key, resolved, "", _autos(resolved, facts), problems)
    if problems:
        raise ConfigError(*problems)
    return resolved


def _would_compile_adam(config: Config, facts: Facts) -> bool:
    """Returns whether an Adam block means DeepSpeed's fused kernel on a CPU, which has no use for it.

    Compiling it takes minutes, and what torch's Adam computes is the same.
    """
    block = config.get("optimizer") or {}
    is_adam = str(block.get("type", "")).lower() in ("adam", "adamw")
    offloads = _offloads(config.get("zero_optimization") or {}, "offload_optimizer")
    return is_adam and not facts.on_gpu and not offloads and "torch_adam" not in (block.get("params") or {})


def check_values(key: str, config: Mapping[str, Any], facts: Facts) -> list[str]:
    """Returns what in a plugin contradicts the run, or cannot be resolved from it."""
    try:
        resolve(key, config, facts)
    except ConfigError as error:
        return error.problems
    if facts.trainable and facts.dtype == torch.float16 and stage_of(config) == 0:
        # engine.backward of DeepSpeed 0.19.8 scales the loss for ZeRO's optimizers only
        why = "its gradients would be divided by a loss scale that DeepSpeed never multiplied the loss by"
        return [f"{key}: ZeRO-0 cannot train in float16: {why}; use zero1, or bfloat16"]
    return []


def log_rewrites(key: str, config: Mapping[str, Any], facts: Facts) -> None:
    """Says which of the plugin's values do not count, or count instead of a value of the model."""
    if not facts.trainable:
        for name, value in _given_batch(config).items():
            if value != _batch(facts)[name]:
                log.info("%s.%s=%s is set to %s: the model is frozen and follows the run", key, name, value,
                         _batch(facts)[name])  # fmt: skip
        for block in ("optimizer", "scheduler"):
            if config.get(block) is not None:
                log.info("%s.%s is left out: the model is frozen", key, block)
    if facts.trainable and _would_compile_adam(dict(config), facts):
        log.info("%s.optimizer: on a CPU torch's own Adam takes the place of DeepSpeed's fused one", key)
    if (config.get("zero_optimization") or {}).get("memory_efficient_linear") is True:
        log.info("%s.zero_optimization.memory_efficient_linear=true is set to false: it changes all models", key)
    clipping = config.get("gradient_clipping", AUTO)
    if facts.trainable and facts.max_grad_norm is not None and clipping not in (AUTO, facts.max_grad_norm):
        log.info("%s.gradient_clipping=%s wins over max_grad_norm=%s", key, clipping, facts.max_grad_norm)


def _batch(facts: Facts) -> dict[str, int]:
    return {
        "train_batch_size": facts.micro_batch * facts.accumulation * facts.world_size,
        "train_micro_batch_size_per_gpu": facts.micro_batch,
        "gradient_accumulation_steps": facts.accumulation,
    }


def _given_batch(config: Mapping[str, Any]) -> dict[str, int]:
    return {name: config[name] for name in BATCH_KEYS if config.get(name, AUTO) not in (AUTO, None)}


def _set_batch(key: str, config: Config, facts: Facts) -> None:
    run = _batch(facts)
    if facts.trainable:
        wrong = [
            f"{key}.{name}={value}, but the run's is {run[name]} (data.batch_size={facts.micro_batch}, "
            f"accumulation {facts.accumulation}, {facts.world_size} ranks); write auto there or change the run"
            for name, value in _given_batch(config).items()
            if value != run[name]
        ]
        if wrong:
            raise ConfigError(*wrong)
    config.update(run)


def _set_dtype(key: str, config: Config, facts: Facts) -> None:
    wanted = {"bf16": facts.dtype == torch.bfloat16, "fp16": facts.dtype == torch.float16}
    for block, enabled in wanted.items():
        given = config.setdefault(block, {}).get("enabled", AUTO)
        if given not in (AUTO, enabled):
            raise ConfigError(
                f"{key}.{block}.enabled={json.dumps(given)}, but the model's dtype is {dtype_name(facts.dtype)}; "
                f"write auto there, or set {key.removesuffix('.plugin')}.dtype"
            )
        config[block]["enabled"] = enabled


def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _autos(config: Config, facts: Facts) -> dict[str, Callable[[], Any]]:
    hidden = facts.hidden_size
    given = ((config.get("optimizer") or {}).get("params") or {}).get("lr", AUTO)
    lr = facts.optimizer.get("lr") if given == AUTO else given
    rate = {} if lr is None else {"optimizer.params.lr": lambda: lr, "scheduler.params.warmup_max_lr": lambda: lr}
    return rate | {
        # as transformers fills them: reduce and prefetch by one square weight, keep small weights whole
        "zero_optimization.reduce_bucket_size": lambda: hidden * hidden if hidden else int(5e8),
        "zero_optimization.stage3_prefetch_bucket_size": lambda: int(0.9 * hidden * hidden) if hidden else int(5e7),
        "zero_optimization.stage3_param_persistence_threshold": lambda: 10 * hidden if hidden else int(1e5),
        "zero_optimization.offload_optimizer.pin_memory": lambda: facts.on_gpu,
        "zero_optimization.offload_param.pin_memory": lambda: facts.on_gpu,
        "optimizer.params.betas": lambda: list(facts.optimizer.get("betas", (0.9, 0.999))),
        "optimizer.params.eps": lambda: facts.optimizer.get("eps", 1e-8),
        "optimizer.params.weight_decay": lambda: facts.optimizer.get("weight_decay", 0.0),
        "optimizer.params.momentum": lambda: facts.optimizer.get("momentum", 0.0),
        "scheduler.params.warmup_min_lr": lambda: 0.0,
        "scheduler.params.warmup_num_steps": facts.warmup_updates,
        "scheduler.params.total_num_steps": lambda: facts.num_updates,
        "scheduler.params.warmup_type": lambda: "linear",
    }


def _replace_autos(
    key: str, node: Config, prefix: str, autos: Mapping[str, Callable[[], Any]], problems: list[str]
) -> None:
    for name, value in list(node.items()):
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            _replace_autos(key, value, f"{path}.", autos, problems)
        elif isinstance(value, list) and AUTO in value:
            problems.append(f"{key}.{path}={value}: an `auto` within a list cannot be resolved; write its numbers")
        elif value != AUTO:
            continue
        elif path in autos:
            node[name] = autos[path]()
        elif prefix in ("zero_optimization.", "bf16.", "fp16."):
            del node[name]  # DeepSpeed's own default
        else:
            problems.append(
                f"{key}.{path}=auto cannot be resolved: nothing in the run says its value; write a number. "
                f"Resolved are: batch sizes, accumulation, clipping, precision, zero_optimization.*, and "
                f"{', '.join(name for name in autos if not name.startswith('zero'))}"
            )
