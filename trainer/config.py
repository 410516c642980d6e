"""The typed schema of a run's configuration, and the error that a wrong one raises."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, OmegaConf

NON_FINITE = ("stop", "skip")  # what trainer.non_finite may be


class ConfigError(ValueError):
    """A configuration that cannot run; holds every problem that was found, one sentence each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def find_name_problems(names: Mapping[str, bool]) -> list[str]:
    """Returns what is wrong with the names of models: they stand in keys of losses and metrics.

    Args:
        names: Name to whether it is trained: "reference" is that of a frozen model whose metrics stand beside others'.
    """
    problems = [
        f"models.{name}: this name means something else in losses and metrics; choose another"
        for name, is_trained in names.items()
        if name == "joint" or (name == "reference" and is_trained)
    ]
    return problems + [
        f"models.{name}: a model's name is made of letters, digits, '_' and '-'; choose another"
        for name in names
        if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None
    ]


def data_nodes(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the shared data and each model's own, with their keys."""
    own = [(f"models.{name}.data", model["data"]) for name, model in config["models"].items() if model["data"]]
    return [("data", config["data"]), *own]


@dataclass(kw_only=True)
class DataConfig:
    """Where the examples come from and how they are cut into micro-batches."""

    train: Any = MISSING  # file, hub name, embedded:<asset>, or a node with _target_
    validation: Any = None  # the same; absent: a seeded split of train
    validation_fraction: float = 0.1
    split_seed: int = 0  # of that split; runs of other seeds are scored on the same rows
    tokenizer: str | None = None  # folder or hub name; absent: that of the first model that has one
    rows: Any = None  # a node with _target_ that makes examples of rows; absent: text for language models
    collate: Any = None  # a node with _target_; absent: padding for text, else torch's
    batch_size: int = 8  # micro-batch per rank
    block_size: int = 512  # tokens; longer examples are cut
    packing: bool = False
    num_workers: int = 0


@dataclass(kw_only=True)
class ModelConfig:
    """One role of `models`; four nodes come from groups of their names, and take any key, as does `lora`."""

    build: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    trainable: bool = True
    dtype: str = "auto"  # float32 | bfloat16 | float16 | auto: bfloat16 where the hardware computes in it, else float32
    freeze: list[str] = field(default_factory=list)  # parameter names (globs) that keep their start value
    lora: dict[str, Any] | None = field(default_factory=dict)  # of peft.LoraConfig; empty: no adapters
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int | None = None  # micro-batches per update; divides the trainer's
    update_every: int = 1  # its losses count in every so many global steps only
    start_step: int | None = None  # the first of them; absent: update_every
    freeze_after: int | None = None  # the last step that may update it; absent: no end
    init_from: str | None = None  # the model whose start weights it takes, and its build where it has none
    data: DataConfig | None = None  # examples of its own; absent: the shared ones


@dataclass(kw_only=True)
class TrainerConfig:
    """How long a run lasts and how often it looks up; every period counts global steps."""

    max_steps: int | None = None
    max_epochs: int | None = None
    stop_at_step: int | None = None  # ends there without shortening the schedules
    val_every: int | None = None  # absent: before the first and after the last step only
    log_every: int = 10
    gradient_accumulation_steps: int = 1
    limit_val_batches: int | None = None
    non_finite: str = "stop"  # stop | skip: what a loss or gradient that is NaN or infinite does to the run
    max_skipped: int = 10  # updates of one model left out in a row; one more ends the run


@dataclass(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and which of them stay."""

    enabled: bool = True
    every: int | None = None  # global steps; absent: only at the end and when a signal ends the run
    keep_last: int = 1  # the newest so many
    keep_best: int = 1  # the best so many, where there is a monitor
    keep_every: int | None = None  # those of steps that it divides, for good
    monitor: str | None = None  # a validation metric, such as val/cross_entropy
    mode: str = "min"  # min | max: which way the monitored metric is better
    background: bool = False  # write in a thread while training goes on; takes memory for a copy


@dataclass(kw_only=True)
class LaunchConfig:
    """How ranks are started when no launcher has done so."""

    num_processes: int | None = None  # absent: all visible GPUs, one process on a CPU
    timeout_seconds: int = 1800  # of a collective
    max_restarts: int = 0  # times that ranks which failed are started again, from the last checkpoint
    requeue: bool = False  # puts the Slurm job back into the queue once SIGTERM has ended the run


@dataclass(kw_only=True)
class ExportConfig:
    """What is written to `export/` at the end."""

    enabled: bool = True
    tolerance: float = 0.001  # largest difference, relative, between a metric before and after reloading


@dataclass(kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    task: dict[str, Any] = MISSING
    models: dict[str, ModelConfig] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    mode: str = "fit"  # fit | validate | export | cache_teacher
    resume: str | None = None  # auto | last | best | a run folder or a checkpoint in it
    seed: int = 0


def register_schema() -> None:
    """Makes `run_schema` known to Hydra's defaults lists, and `${only_of:...}` to configurations."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    OmegaConf.register_new_resolver("only_of", only_of, replace=True)


def only_of(
    build: Mapping[str, Any] | None, lora: Mapping[str, Any] | None, trainable: bool, name: str, value: list[Any]
) -> list[Any]:
    """Returns weights to freeze that are meant for the model of one name; none where another is built or all are kept.

    A preset's globs of one model's layers would match others of any other model, without a word.
    """
    return value if build is not None and build.get("name") == name and trainable and not lora else []
