"""Says what is wrong with a configuration that composes, before anything is allocated or started."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer import launch, outputs
from trainer.config import NON_FINITE, data_nodes, find_name_problems
from trainer.start_weights import find_origin_problems
from trainer.targets import target_problems
from trainer.updates import UpdatePlan
from trainer.words import did_you_mean

Config = Mapping[str, Any]

_MODES = ("fit", "validate", "export", "cache_teacher")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def problems(cfg: DictConfig, overrides: list[str]) -> list[str]:
    """Returns every problem, one sentence each.

    Args:
        cfg: What composes of the configuration; the rest has its problems already.
        overrides: The command line's, to tell what a user asked for from a task's defaults.
    """
    outputs.quiet_third_parties()
    config: Config = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    found = [f"{key} is missing; give it: {key}=..." for key in _missing(config)]
    for check in (target_problems, _check_ranges, _check_models, _check_data, _check_builds, _check_launch):
        found += check(config)
    found += _check_plugins(config, overrides)
    found += _check_adapters(config, found)
    found += _check_quantization(config, found)
    found += _check_freezing(config, found)
    found += _check_vocabularies(config, found)
    found += _check_by_trial(config, found)
    return list(dict.fromkeys(found))


def _missing(value: Any, key: str = "") -> Iterator[str]:
    if value == "???":
        yield key
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}.{index}")


# --- values


def _check_ranges(config: Config) -> Iterator[str]:
    yield from _one_of("mode", config["mode"], _MODES)
    if config["mode"] == "cache_teacher" and config["resume"] is not None:
        yield f"resume={config['resume']}: mode=cache_teacher reads no checkpoint and goes on by itself; drop resume"
    trainer, checkpoint = config["trainer"], config["checkpoint"]
    yield from _one_of("checkpoint.mode", checkpoint["mode"], ("min", "max"))
    for key, value in (
        ("trainer.max_steps", trainer["max_steps"]),
        ("trainer.max_epochs", trainer["max_epochs"]),
        ("trainer.stop_at_step", trainer["stop_at_step"]),
        ("trainer.val_every", trainer["val_every"]),
        ("trainer.log_every", trainer["log_every"]),
        ("trainer.gradient_accumulation_steps", trainer["gradient_accumulation_steps"]),
        ("trainer.limit_val_batches", trainer["limit_val_batches"]),
        ("checkpoint.every", checkpoint["every"]),
        ("checkpoint.keep_last", checkpoint["keep_last"]),
        ("checkpoint.keep_every", checkpoint["keep_every"]),
        ("launch.num_processes", config["launch"]["num_processes"]),
        ("launch.timeout_seconds", config["launch"]["timeout_seconds"]),
    ):
        yield from _at_least(key, value, 1)
    yield from _at_least("checkpoint.keep_best", checkpoint["keep_best"], 0)
    yield from _at_least("trainer.max_skipped", trainer["max_skipped"], 0)
    yield from _one_of("trainer.non_finite", trainer["non_finite"], NON_FINITE)
    yield from _at_least("launch.max_restarts", config["launch"]["max_restarts"], 0)
    yield from _at_least("seed", config["seed"], 0)
    for key, data in data_nodes(config):
        yield from _at_least(f"{key}.batch_size", data["batch_size"], 1)
        yield from _at_least(f"{key}.block_size", data["block_size"], 2)  # one token to read, one to predict
        yield from _at_least(f"{key}.num_workers", data["num_workers"], 0)
        yield from _at_least(f"{key}.split_seed", data["split_seed"], 0)
        if not 0 < data["validation_fraction"] < 1:
            yield f"{key}.validation_fraction={data['validation_fraction']}: must lie between 0 and 1"
    if not config["export"]["tolerance"] > 0:
        yield f"export.tolerance={config['export']['tolerance']}: must be above 0"
    if config["mode"] == "fit" and trainer["max_steps"] is None and trainer["max_epochs"] is None:
        yield "trainer.max_steps and trainer.max_epochs are both missing; give one: trainer.max_steps=1000"


def _at_least(key: str, value: Any, least: int) -> Iterator[str]:
    if value is not None and value != "???" and value < least:
        yield f"{key}={value}: must be at least {least}"


def _one_of(key: str, value: str, known: tuple[str, ...]) -> Iterator[str]:
    if value not in known:
        yield f"{key}={value}: must be one of {', '.join(known)}{did_you_mean(value, known)}"


# --- models


def _check_models(config: Config) -> Iterator[str]:
    models = config["models"]
    if not models:
        yield "models is empty; a task names at least one, such as models.student"
    for name, model in models.items():
        yield from _one_of(f"models.{name}.dtype", model["dtype"], _DTYPES)
        yield from _check_window(name, model, config["trainer"]["gradient_accumulation_steps"])
        yield from _check_plan(name, model, config)
        yield from _check_optimizer(name, model)
    yield from find_name_problems({name: model["trainable"] for name, model in models.items()})
    yield from find_origin_problems({name: model["init_from"] for name, model in models.items()})
    if models and config["mode"] == "fit" and not any(model["trainable"] for model in models.values()):
        first = next(iter(models))
        yield f"no model is trainable, but mode is fit; set models.{first}.trainable=true, or mode=validate"


def _check_window(name: str, model: Config, window: int) -> Iterator[str]:
    key, steps = f"models.{name}.gradient_accumulation_steps", model["gradient_accumulation_steps"]
    yield from _at_least(key, steps, 1)
    if steps is not None and steps >= 1 and window >= 1 and window % steps:
        yield f"{key}={steps}: must divide trainer.gradient_accumulation_steps={window}"
    norm = model["max_grad_norm"]
    if norm is not None and not norm > 0:
        yield f"models.{name}.max_grad_norm={norm}: must be above 0, or null for no clipping"


def _check_plan(name: str, model: Config, config: Config) -> Iterator[str]:
    plan = _plan(model)
    if model["trainable"]:
        yield from plan.find_problems(name, config["trainer"]["max_steps"] if config["mode"] == "fit" else None)
    elif plan != UpdatePlan():
        yield (
            f"models.{name} is frozen (trainable: false), so update_every, start_step and freeze_after mean nothing; "
            f"drop them, or set models.{name}.trainable=true"
        )


def _plan(model: Config) -> UpdatePlan:
    return UpdatePlan(
        update_every=model["update_every"], start_step=model["start_step"], freeze_after=model["freeze_after"]
    )


def _check_optimizer(name: str, model: Config) -> Iterator[str]:
    plugin = model["plugin"] or {}
    # A DeepSpeed file may bring its own optimizer; plugins.py reads it.
    may_bring_own = "optimizer" in plugin or "path" in plugin
    if model["trainable"] and not model["optimizer"] and not may_bring_own:
        yield (
            f"models.{name}.optimizer is missing, but models.{name} is trainable; "
            f"add `- /optimizer@models.{name}.optimizer: adamw` to the task's defaults, "
            f"or give optimizer@models.{name}.optimizer=adamw"
        )
    for word, value in (model["optimizer"] or {}).items():
        if word == "lr" and isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"models.{name}.optimizer.lr={value}: must be a finite number of at least 0"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"models.{name}.optimizer.{word}={value}: must be a finite number"
    for part in ("optimizer", "scheduler"):
        if not model["trainable"] and model[part]:
            yield (
                f"models.{name}.{part} is given, but models.{name} is frozen (trainable: false); "
                f"choose {part}@models.{name}.{part}=null, or set models.{name}.trainable=true"
            )


# --- what other files know best, imported only here: they need torch


def _check_data(config: Config) -> list[str]:
    from trainer.data.files import check_source
    from trainer.data.tokenizers import check_tokenizer

    found: list[str] = []
    for key, data in data_nodes(config):
        if data["train"] is None and (key != "data" or not _all_own(config)):
            found.append(f"{key}.train is null; give a file, a hub name, embedded:<asset>, or a node with _target_")
        found += check_tokenizer(f"{key}.tokenizer", data["tokenizer"])
        for part in ("train", "validation"):
            source = data[part]
            if isinstance(source, str) and source != "???":
                found += check_source(f"{key}.{part}", source)
            elif source is not None and not isinstance(source, str | Mapping):
                found.append(
                    f"{key}.{part}={source}: must be a file, a hub name, embedded:<asset>, or a node with _target_"
                )
            elif isinstance(source, Mapping) and "_target_" not in source:
                found.append(f"{key}.{part} has no _target_; name the callable that returns a dataset")
        for part in ("rows", "collate"):
            node = data[part]
            if node is not None and not (isinstance(node, Mapping) and "_target_" in node):
                found.append(f"{key}.{part}={node}: must be a node with _target_, or null")
        if data["rows"] is not None and data["packing"]:
            found.append(f"{key}.packing=true: only text is packed, and {key}.rows reads other rows; set it to false")
    return found


def _all_own(config: Config) -> bool:
    return all(model["data"] for model in config["models"].values())


def _check_builds(config: Config) -> list[str]:
    from trainer.adapters import check_folder
    from trainer.check_builds import check_build
    from trainer.scorers import find_head_problem

    found: list[str] = []
    for name, model in config["models"].items():
        build = model["build"] or {}
        if "_target_" in build and not list(_missing(build)):
            key, source = f"models.{name}.build", build.get("name")
            own = check_build(key, build)
            if isinstance(source, str):
                own = own or check_folder(f"{key}.name", source, trainable=model["trainable"])
            if not own and not model["trainable"] and model["init_from"] is None:
                own = find_head_problem(key, build)
            found += own
    return found


def _check_adapters(config: Config, found: list[str]) -> list[str]:
    adapted = {name: model for name, model in config["models"].items() if model["lora"]}
    if not adapted:
        return []
    from trainer.adapters import check_fit, check_lora
    from trainer.models import empty_model
    from trainer.plugins import read_plugin, stage_of
    from trainer.scorers import find_adapter_problem

    problems: list[str] = []
    for name, model in adapted.items():
        key = f"models.{name}"
        if any(problem.startswith(f"{key}.plugin") for problem in found):
            continue
        stage = stage_of(read_plugin(f"{key}.plugin", model["plugin"]))
        own = check_lora(key, model["lora"], trainable=model["trainable"], freeze=model["freeze"], stage=stage)
        if config["export"]["enabled"] and str(model["build"].get("_target_")).endswith("_from_config"):
            own.append(
                f"{key}.lora: the export holds the adapters, not the random weights of {key}.build below them; choose "
                f"model@{key}.build=causal_lm, or export.enabled=false"
            )
        if not own and not any(problem.startswith(f"{key}.build") for problem in found):
            own += find_adapter_problem(key, _origin(config, model), model["lora"])
            empty = empty_model(model["build"])
            own += check_fit(f"{key}.lora", model["lora"], empty, stage=stage) if empty is not None else []
        problems += own
    return problems


def _check_freezing(config: Config, found: list[str]) -> list[str]:
    frozen = [name for name, model in config["models"].items() if model["freeze"]]
    if not frozen:
        return []
    from trainer.freezing import find_freezing_problems
    from trainer.models import empty_model
    from trainer.scorers import find_frozen_head

    problems: list[str] = []
    for name in frozen:
        key, model = f"models.{name}", config["models"][name]
        patterns = model["freeze"]
        if not all(isinstance(pattern, str) for pattern in patterns):
            problems.append(f"{key}.freeze={patterns}: must be a list of texts, such as ['model.layers.0.*']")
        elif not model["trainable"]:
            problems.append(
                f"{key}.freeze={patterns}: {key} is frozen as a whole (trainable: false); drop freeze, or set "
                f"{key}.trainable=true"
            )
        elif not any(problem.startswith(f"{key}.") for problem in found):
            empty = empty_model(model["build"])
            own = find_freezing_problems(empty, patterns, key=f"{key}.freeze") if empty is not None else []
            problems += own or find_frozen_head(key, _origin(config, model), patterns)
    return problems


def _origin(config: Config, model: Config) -> Config:
    """Returns the build that a model's start weights are of."""
    for _ in config["models"]:
        if model["init_from"] in config["models"]:
            model = config["models"][model["init_from"]]
    build: Config = model["build"]
    return build


def _check_vocabularies(config: Config, found: list[str]) -> Iterator[str]:
    """Holds a tokenizer that is on disk against the models whose settings are given here."""
    from trainer import assets
    from trainer.data.tokenizers import find_vocabulary_problem, load_tokenizer
    from trainer.models import empty_model

    for name, model in config["models"].items():
        build, source = model["build"] or {}, (model["data"] or config["data"])["tokenizer"]
        own = (f"models.{name}.", "data.tokenizer")
        if not isinstance(build.get("config"), Mapping) or source is None or any(p.startswith(own) for p in found):
            continue
        is_at_hand = Path(source).expanduser().is_dir()
        if source.startswith(assets.PREFIX):  # what is no model is a tokenizer in this package, and not fetched
            is_at_hand = assets.find_problem(source) != assets.find_tokenizer_problem(source)
        if is_at_hand and (empty := empty_model(build)) is not None:
            yield from find_vocabulary_problem(name, empty, load_tokenizer(source))


def _check_quantization(config: Config, found: list[str]) -> list[str]:
    kinds = {name: (model["build"] or {}).get("quantization") for name, model in config["models"].items()}
    if not any(kind is not None for kind in kinds.values()):
        return []
    from trainer.plugins import read_plugin, uses_engine
    from trainer.quantization import find_origin_problem, find_quantization_problems

    problems: list[str] = []
    for name, model in config["models"].items():
        key = f"models.{name}"
        if not any(problem.startswith(f"{key}.plugin") for problem in found):
            problems += find_quantization_problems(
                key,
                kinds[name],
                trainable=model["trainable"],
                has_engine=uses_engine(read_plugin(f"{key}.plugin", model["plugin"])),
                init_from=model["init_from"],
            )
        problems += find_origin_problem(name, model["init_from"], kinds)
    return problems


def _check_by_trial(config: Config, found: list[str]) -> list[str]:
    from trainer.trial import trial_problems

    return trial_problems(config, found)


def _check_plugins(config: Config, overrides: list[str]) -> list[str]:
    from trainer.plugins import check_plugins

    whole = {name: model for name, model in config["models"].items() if not list(_missing(model["plugin"]))}
    return check_plugins(whole, overrides) or [text for name in whole for text in _check_values(config, name)]


def _check_values(config: Config, name: str) -> list[str]:
    """Holds what a plugin says outright against the run."""
    import torch

    from trainer.plugins import Facts, check_values, dtype_of, read_plugin, uses_engine

    key, model = f"models.{name}.plugin", config["models"][name]
    plugin = read_plugin(key, model["plugin"])
    if not uses_engine(plugin) or model["dtype"] not in _DTYPES:
        return []
    dtype = getattr(torch, model["dtype"]) if model["dtype"] != "auto" else dtype_of(plugin) or torch.float32
    if dtype == torch.float16 and not launch.count_gpus():
        return [f"models.{name}.dtype=float16 does not exist on a CPU in DeepSpeed; use float32 or bfloat16"]
    facts = Facts(
        micro_batch=(model["data"] or config["data"])["batch_size"],
        accumulation=model["gradient_accumulation_steps"] or config["trainer"]["gradient_accumulation_steps"],
        world_size=launch.planned_ranks(config["launch"]["num_processes"]),
        dtype=dtype,
        trainable=model["trainable"],
        max_grad_norm=model["max_grad_norm"],
        optimizer=model["optimizer"] or {},
        scheduler=model["scheduler"] or {},
    )
    return [*check_values(key, plugin, facts), *_check_saving(key, model, plugin, config)]


def _check_saving(key: str, model: Config, plugin: dict[str, Any], config: Config) -> Iterator[str]:
    from trainer.saving.fragments import find_problem

    is_saved = config["checkpoint"]["enabled"] and config["mode"] == "fit" and model["trainable"]
    if is_saved and plugin.get("zero_optimization"):
        problem = find_problem(plugin)
        if problem is not None:
            yield f"{key}.{problem}; or give checkpoint.enabled=false"


def _check_launch(config: Config) -> Iterator[str]:
    wanted, gpus = config["launch"]["num_processes"], launch.count_gpus()
    if wanted is not None and gpus and wanted > gpus:
        yield f"launch.num_processes={wanted}: only {gpus} GPU(s) are visible; CUDA_VISIBLE_DEVICES= leaves the CPU"
    if wanted is not None and launch.is_rank() and wanted != int(os.environ["WORLD_SIZE"]):
        yield (
            f"launch.num_processes={wanted}: another launcher has started {os.environ['WORLD_SIZE']} ranks; "
            "leave it out, or start without that launcher"
        )
    restarts = config["launch"]["max_restarts"]
    if restarts and launch.is_rank():
        yield (
            f"launch.max_restarts={restarts}: another launcher has started these ranks; leave it out, and have that "
            f"one start them again: torchrun --max-restarts={restarts}, with resume=auto and a fixed hydra.run.dir=..."
        )
