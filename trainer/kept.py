"""What a resumed run must keep of its configuration, and what of it has changed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import ConfigError

_KEEPS = "a resumed run keeps its models, task, data and seed"
_MAY_CHANGE = re.compile(
    r"(trainer|launch|logger|callbacks|checkpoint|export|mode|resume|hydra)(\.|$)|"
    r"models\.[^.]+\.(plugin(\.|$)|gradient_accumulation_steps$)|"
    r"(models\.[^.]+\.)?data\.(batch_size|num_workers)$"
)
# What a plugin says of the arithmetic, and not of where things are held.
_ARITHMETIC = re.compile(
    r"models\.[^.]+\.plugin\.(gradient_clipping|optimizer|scheduler|fp16|bf16|torch_autocast|prescale_gradients|"
    r"gradient_predivide_factor|gradient_allreduce_op|data_types|(seq_parallel_)?communication_data_type|"
    r"compression_training|weight_quantization|progressive_layer_drop|curriculum_learning|data_efficiency|"
    r"zero_optimization\.(zero_quantized_\w+|zenflow))(\.|$)"
)
_OPTIMIZER = re.compile(r"models\.[^.]+\.optimizer")
# The same algorithm with the same state, on the GPU and offloaded; their constructors' defaults where they differ.
_ADAMW = {
    "torch.optim.AdamW": {"weight_decay": 0.01},
    "deepspeed.ops.adam.DeepSpeedCPUAdam": {"weight_decay": 0.0},
}
_ADAMW_DEFAULTS = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False, "adamw_mode": True}
_ABSENT = object()


def problems(
    saved: DictConfig,
    cfg: DictConfig,
    *,
    checkpoint: Path,
    step: int,
    saved_ranks: int,
    ranks: int,
    may_differ: Sequence[str] = (),
) -> list[str]:
    """Returns every change that the run cannot be resumed with.

    Args:
        saved: The configuration in the checkpoint.
        cfg: The configuration to go on with.
        checkpoint: The checkpoint's folder, which also holds the content of files that plugins are read from.
        step: The checkpoint's global step.
        saved_ranks: How many ranks the run had when it was saved.
        ranks: How many it will have.
        may_differ: Keys of the task that may change.
    """
    old, new, files = _with_plugins(saved, cfg, checkpoint)
    found = list(_changes(old, new, may_differ=may_differ, files=files))
    if cfg.mode == "fit":
        found += _too_short(cfg, step)
        found += _batch_problems(saved, cfg, saved_ranks=saved_ranks, ranks=ranks)
        found += _update_problems(saved, cfg)
    return found


def differing_keys(saved: DictConfig, cfg: DictConfig) -> list[str]:
    """Returns the keys whose values differ; where an object is of another class, only its `_target_`."""
    return [key for key, _, _ in _differences(saved, cfg)]


# --- keys


def plugin_file(name: str) -> str:
    """Returns where in a checkpoint the content of the file is that a model's plugin was read from."""
    return f"plugin-{name}.json"


def _with_plugins(
    saved: DictConfig, cfg: DictConfig, checkpoint: Path
) -> tuple[DictConfig, DictConfig, dict[str, str]]:
    """Returns both configurations with the content of DeepSpeed files in the place of their paths, where it is known.

    And the files that are read now, by the keys of what they say.
    """
    from trainer.plugins import read_plugin

    old, new, files = saved.copy(), cfg.copy(), dict[str, str]()
    for part in (old, new):
        OmegaConf.set_struct(part, False)
    for name in map(str, cfg.models):
        if name not in saved.models:
            continue
        file = checkpoint / plugin_file(name)
        was_read, is_read = ("path" in (part.models[name].plugin or {}) for part in (saved, cfg))
        if was_read and not file.is_file():
            continue  # saved before that was written
        try:
            if is_read:
                files[f"models.{name}.plugin."] = str(cfg.models[name].plugin.path)
                read = read_plugin(f"models.{name}.plugin", _resolved(cfg, f"models.{name}.plugin"))
                if not read:
                    continue  # check.py says so
                new.models[name].plugin = read
            if was_read:
                old.models[name].plugin = json.loads(file.read_text(encoding="utf-8"))
        except (ConfigError, ValueError):  # check.py names a file that cannot be read, the ranks a damaged checkpoint
            continue
        for part in (old, new):
            _drop_autos(part.models[name].plugin)
    return old, new, files


def _drop_autos(plugin: DictConfig) -> None:
    """Takes out of a plugin what says the same as nothing."""
    for block, word in ((plugin, "gradient_clipping"), *((plugin.get(of) or {}, "enabled") for of in ("bf16", "fp16"))):
        if block.get(word) == "auto":
            del block[word]
    for name in ("bf16", "fp16"):
        if name in plugin and not plugin[name]:
            del plugin[name]


def _changes(
    saved: DictConfig, cfg: DictConfig, *, may_differ: Sequence[str], files: Mapping[str, str]
) -> Iterator[str]:
    for key, old, new in _differences(saved, cfg):
        if _MAY_CHANGE.match(key) and not _ARITHMETIC.match(key):
            continue
        if f"{key}.".startswith(tuple(f"task.{name}." for name in may_differ)):
            continue
        fix = next((f"change {path} back" for place, path in files.items() if key.startswith(place)), "")
        optimizer = key.rpartition(".")[0]
        if key.endswith("._target_") and _OPTIMIZER.fullmatch(optimizer) and old in _ADAMW and new in _ADAMW:
            yield from _adamw_changes(optimizer, _resolved(saved, optimizer), _resolved(cfg, optimizer))
        elif new is _ABSENT:
            has = f"the run that is resumed has {_written(old)}"
            yield f"{key} is gone: {has}; {_KEEPS}; {fix or 'drop that'}, or start a new run"
        else:
            has = "none" if old is _ABSENT else _written(old)
            has = f"the run that is resumed has {has}"
            yield f"{key}={_written(new)}: {has}; {_KEEPS}; {fix or 'drop it'}, or start a new run"


def _differences(saved: DictConfig, cfg: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    def is_same(key: str, old: Any, new: Any) -> bool:
        if old == new or old == "???" or (old in (None, {}) and new in (None, {})):
            return True  # "???": a secret, which is not saved
        is_given = old is not _ABSENT and new is not _ABSENT
        return is_given and bool(_resolved(saved, key) == _resolved(cfg, key))

    def walk(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
        if is_same(key, old, new):
            return
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            yield key, old, new
            return
        target = f"{key}._target_"
        if "_target_" in old and "_target_" in new and not is_same(target, old["_target_"], new["_target_"]):
            yield target, old["_target_"], new["_target_"]
            return
        for name in {**old, **new}:
            yield from walk(f"{key}.{name}" if key else str(name), old.get(name, _ABSENT), new.get(name, _ABSENT))

    yield from walk("", _raw(saved), _raw(cfg))


def _raw(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg, resolve=False)


def _resolved(cfg: DictConfig, key: str) -> Any:
    """Returns a value as plain containers; what cannot be resolved here equals nothing."""
    try:
        value = OmegaConf.select(cfg, key) if key else cfg
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return object()


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return str(value["_target_"]) if "_target_" in value else f"{{{', '.join(map(str, value))}}}"
    return f"[{','.join(map(_written, value))}]" if isinstance(value, list) else str(value)


def _adamw_changes(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before = {**_ADAMW_DEFAULTS, **_ADAMW[old["_target_"]], **old}
    after = {**_ADAMW_DEFAULTS, **_ADAMW[new["_target_"]], **new}
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode"):
        if before[name] != after[name]:
            yield (
                f"{key}.{name}={_written(after[name])}: the run that is resumed has {_written(before[name])}; "
                f"give {key}.{name}={_written(before[name])}, or start a new run"
            )


# --- sizes


def _too_short(cfg: DictConfig, step: int) -> Iterator[str]:
    for name in ("max_steps", "stop_at_step"):
        last = cfg.trainer[name]
        if last is not None and last < step:
            yield (
                f"trainer.{name}={last}: the checkpoint is of step {step}; give trainer.{name}={step} or more, or "
                "resume an earlier checkpoint"
            )


def _batch_problems(saved: DictConfig, cfg: DictConfig, *, saved_ranks: int, ranks: int) -> Iterator[str]:
    window, saved_window = cfg.trainer.gradient_accumulation_steps, saved.trainer.gradient_accumulation_steps
    sizes, saved_sizes = _batch_sizes(cfg), _batch_sizes(saved)
    common = [key for key in sizes if key in saved_sizes]
    windows = {saved_sizes[key] * saved_window * saved_ranks / max(1, sizes[key] * ranks) for key in common}
    for key in common:
        size, saved_size = sizes[key], saved_sizes[key]
        wanted = saved_size * saved_window * saved_ranks
        if min(size, window, ranks) < 1 or size * window * ranks == wanted:  # check.py names the first three
            continue
        fixes = [f"{key}.batch_size={wanted // (window * ranks)}"] if wanted % (window * ranks) == 0 else []
        if len(windows) == 1 and (other := next(iter(windows))) >= 1 and other.is_integer():
            fixes.append(f"trainer.gradient_accumulation_steps={int(other)}")
        hint = f"give {' or '.join(fixes)}" if fixes else f"choose a number of ranks that divides {wanted}"
        instead = f" instead of {saved_ranks}" if ranks != saved_ranks else ""
        yield (
            f"{key}.batch_size={size} and trainer.gradient_accumulation_steps={window} on {_ranks(ranks)}{instead} "
            f"make a global batch of {size * window * ranks}, but the run that is resumed has {wanted} "
            f"({saved_size} x {saved_window} x {saved_ranks}); {hint}"
        )


def _batch_sizes(cfg: DictConfig) -> dict[str, int]:
    """Returns the micro-batch of each data set that is read, by its key."""
    own = {f"models.{name}.data": model.data.batch_size for name, model in cfg.models.items() if model.data is not None}
    return own if len(own) == len(cfg.models) else {"data": cfg.data.batch_size, **own}


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _update_problems(saved: DictConfig, cfg: DictConfig) -> Iterator[str]:
    window, saved_window = cfg.trainer.gradient_accumulation_steps, saved.trainer.gradient_accumulation_steps
    for name, model in cfg.models.items():
        if name not in saved.models or not model.trainable:
            continue
        own = model.gradient_accumulation_steps or window
        updates = saved_window // (saved.models[name].gradient_accumulation_steps or saved_window)
        if min(own, window) < 1 or window % own or window // own == updates:  # check.py names the first two
            continue
        key = f"models.{name}.gradient_accumulation_steps"
        fix = f"give {key}={window // updates}" if window % updates == 0 else f"choose a multiple of {updates}"
        yield (
            f"{key}={own} and trainer.gradient_accumulation_steps={window} make {window // own} updates in a global "
            f"step, but the run that is resumed has {updates}; {fix}"
        )
