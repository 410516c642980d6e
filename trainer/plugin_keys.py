"""The keys, types and blocks that DeepSpeed knows, and what in a configuration differs from them."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

Config = dict[str, Any]

AUTO = "auto"

# DeepSpeed 0.19.8 takes any other top-level key without a word (runtime/config.py, runtime/constants.py).
SCALAR_TYPES: dict[str, tuple[type, ...]] = {
    "train_batch_size": (int,),
    "train_micro_batch_size_per_gpu": (int,),
    "gradient_accumulation_steps": (int,),
    "steps_per_print": (int, float),
    "gradient_clipping": (int, float),
    "prescale_gradients": (bool,),
    "gradient_predivide_factor": (int, float),
    "gradient_allreduce_op": (str,),
    "communication_data_type": (str,),
    "seq_parallel_communication_data_type": (str,),
    "disable_allgather": (bool,),
    "disable_python_gc": (bool,),
    "dump_state": (bool,),
    "wall_clock_breakdown": (bool,),
    "memory_breakdown": (bool,),
    "dataloader_drop_last": (bool,),
    "zero_allow_untested_optimizer": (bool,),
    "zero_force_ds_cpu_optimizer": (bool,),
    "use_data_before_expert_parallelism": (bool,),
    "log_level": (str,),
    "sequence_parallel_size": (int,),
}
BLOCKS = frozenset({
    "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "torch_autocast", "data_types", "checkpoint",
    "activation_checkpointing", "aio", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor",
    "comet", "monitor_config", "timers", "compile", "hybrid_engine", "tensor_parallel", "expert_parallel",
    "weight_quantization", "data_efficiency", "curriculum_learning", "autotuning", "elasticity", "pipeline",
    "compression_training", "sparse_attention", "eigenvalue", "progressive_layer_drop", "datastates_ckpt", "nebula",
    "use_node_local_storage", "python_gc", "amp",
})  # fmt: skip
UNSUPPORTED = {
    "managed_gradient_accumulation": "the trainer owns the accumulation boundary; remove the key",
    "amp": "NVIDIA Apex AMP is not supported; set models.<name>.dtype",
    "pipeline": "pipeline engines are not supported",
    "elasticity": "it changes the batch size behind the trainer's back; remove the block",
    "sparse_attention": "DeepSpeed removed it",
}
_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps",
                 "total_num_steps")  # fmt: skip


def check_keys(key: str, config: Config) -> list[str]:
    """Returns what DeepSpeed would ignore or fail on: unknown keys, wrong types, optimizers that do not exist."""
    return [*_check_keys(key, config), *_check_blocks(key, config), *_check_classes(key, config)]


def _check_keys(key: str, config: Config) -> Iterator[str]:
    known = sorted(BLOCKS | set(SCALAR_TYPES))
    for name, value in config.items():
        if name in UNSUPPORTED:
            yield f"{key}.{name} is not supported: {UNSUPPORTED[name]}"
        elif name not in known:
            yield f"{key}.{name} is no DeepSpeed key, and DeepSpeed would ignore it{_did_you_mean(name, known)}"
        elif name in SCALAR_TYPES and value != AUTO and not _is_of(value, SCALAR_TYPES[name]):
            expected = " or ".join(kind.__name__ for kind in SCALAR_TYPES[name])
            yield f"{key}.{name}={value!r} must be {expected}, but is {type(value).__name__}"
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"{key}.{name}={value!r} must be a finite number of at least 0"


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _check_blocks(key: str, config: Config) -> Iterator[str]:
    for name, schema in _block_schemas().items():
        block = config.get(name)
        if block is None:
            continue
        if not isinstance(block, dict):
            yield f"{key}.{name}={block!r} must be a mapping"
            continue
        try:
            schema(**_without_autos(block))
        except ValidationError as error:
            yield from (_explain(f"{key}.{name}", schema, item) for item in error.errors())
        except (ValueError, AssertionError) as error:
            yield f"{key}.{name}: {error}"
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == AUTO:
        yield f"{key}.zero_optimization.stage=auto cannot be resolved: it is the choice to make; write 0, 1, 2 or 3"
    for name in sorted(BLOCKS - set(_block_schemas()) - {"optimizer", "scheduler"}):
        if config.get(name) is not None and not isinstance(config[name], dict):
            yield f"{key}.{name}={config[name]!r} must be a mapping"


def _check_classes(key: str, config: Config) -> Iterator[str]:
    """Holds the optimizer and the scheduler block against the class that each names."""
    for name, find in (("optimizer", _find_optimizer), ("scheduler", _find_scheduler)):
        block = config.get(name)
        if block is None:
            continue
        if not (isinstance(block, dict) and isinstance(block.get("type"), str)):
            yield f"{key}.{name}={block!r} must be a mapping with 'type' and 'params'"
            continue
        kind = block["type"]
        known, parameters = find(kind)
        if kind not in known:
            yield f"{key}.{name}.type={kind}: DeepSpeed has no such {name}{_did_you_mean(kind, known)}"
        yield from _check_params(f"{key}.{name}", block.get("params"), parameters)


def _check_params(key: str, params: Any, known: set[str] | None) -> Iterator[str]:
    if params is not None and not isinstance(params, dict):
        yield f"{key}.params={params!r} must be a mapping"
        return
    for word, value in (params or {}).items():
        if known is not None and word not in known:
            yield f"{key}.params.{word}: there is no such parameter{_did_you_mean(word, sorted(known))}"
        elif word in _NOT_NEGATIVE and value != AUTO and not (_is_of(value, (int, float)) and 0 <= value < math.inf):
            yield f"{key}.params.{word}={value!r} must be a finite number of at least 0"


def _find_optimizer(name: str) -> tuple[list[str], set[str] | None]:
    """Returns the names that DeepSpeed takes, and the parameters of this one; None where only DeepSpeed knows them."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    own = [kind for kind in vars(torch.optim) if kind[:1].isupper() and kind != "Optimizer"]
    known = [*own, *DEEPSPEED_OPTIMIZERS, *([name] if name.lower() in DEEPSPEED_OPTIMIZERS else [])]
    if name.lower() in ("adam", "adamw"):
        switches = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
        return known, switches.union(*map(_parameters, (DeepSpeedCPUAdam, FusedAdam, torch.optim.AdamW)))
    if name in own and name.lower() not in DEEPSPEED_OPTIMIZERS:
        return known, _parameters(getattr(torch.optim, name))
    return known, None


def _find_scheduler(name: str) -> tuple[list[str], set[str] | None]:
    from deepspeed.runtime import lr_schedules

    of_torch = [kind for kind in torch.optim.lr_scheduler.__all__ if kind != "LRScheduler"]
    known = [*lr_schedules.VALID_LR_SCHEDULES, *of_torch]
    if name not in known:
        return known, None
    place: Any = torch.optim.lr_scheduler if name in of_torch else lr_schedules
    return known, _parameters(getattr(place, name))


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "params", "model_params", "optimizer"}


def _block_schemas() -> dict[str, type[BaseModel]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }


def _without_autos(block: Mapping[str, Any]) -> Config:
    plain = {key: _without_autos(value) if isinstance(value, Mapping) else value for key, value in block.items()}
    return {key: value for key, value in plain.items() if value != AUTO}


def _explain(key: str, schema: type[BaseModel], item: Mapping[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    where = ".".join([key, *path])
    if item["type"] == "extra_forbidden":
        known = [alias for name, info in schema.model_fields.items() for alias in (info.alias or name,)]
        return f"{where} is no DeepSpeed key{_did_you_mean(path[-1], known) if len(path) == 1 else ''}"
    return f"{where}={item.get('input')!r}: {item['msg']}"


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
