"""Turns a run's configuration into objects; the only file that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerBase

from trainer import distributed
from trainer.callbacks.callback import Callback
from trainer.config import ConfigError, DataConfig, ModelConfig
from trainer.data import (
    PaddingCollator,
    build_text_dataset,
    check_same_vocabulary,
    deduplicate,
    load_rows,
    load_tokenizer,
    split_rows,
)
from trainer.data.reader import RowReader
from trainer.data.rows import Row
from trainer.data.sources import TrainingData
from trainer.loggers.logger import Logger
from trainer.models import tokenizer_name
from trainer.plugins import Config, read_plugin
from trainer.saving.checkpoints import CheckpointPlan
from trainer.specs import ModelSpec
from trainer.task import TaskModule
from trainer.trainer import MultiModelTrainer
from trainer.updates import UpdatePlan

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """Everything that a run needs, made and not yet started."""

    trainer: MultiModelTrainer
    task: TaskModule
    models: dict[str, ModelSpec]
    data: TrainingData


def build_run(cfg: DictConfig) -> Run:
    """Returns the objects that the configuration describes; models are built later, each under its own plugin."""
    task: TaskModule = make(cfg.task)
    names = task.models_for(cfg.mode, [str(name) for name in cfg.models])
    trainer = build_trainer(cfg, names)  # before data: the ranks find each other before any of them waits
    models = {name: build_model_spec(cfg.models[name]) for name in names}
    tokenizers = load_tokenizers(cfg)
    for name, node in cfg.models.items():
        if node.data is not None and name in models:
            models[str(name)].data = build_data(
                cfg, f"models.{name}.data", node.data, [str(name)], built=names, tokenizers=tokenizers
            )
    sharing = [str(name) for name, model in cfg.models.items() if model.data is None]
    if not sharing:
        log.info("every model has data of its own; those of `data` are not read")
    data = TrainingData()
    if sharing:
        data = build_data(
            cfg, "data", cfg.data, sharing, built=names, tokenizers=tokenizers, own_tokens=task.own_tokens
        )
    for name, model in models.items():
        model.tokenizer = tokenizers.get(name) if name in task.own_tokens else None
    return Run(trainer=trainer, task=task, models=models, data=data)


def make(node: Mapping[str, Any], **arguments: Any) -> Any:
    """Returns the object of a node with `_target_`, made from plain containers."""
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None  # a refusal, not a bug in what was called
        raise


def build_trainer(cfg: DictConfig, names: Sequence[str]) -> MultiModelTrainer:
    """Returns the trainer with the plugins of these models, callbacks and, on rank 0, loggers."""
    options = cfg.trainer
    return MultiModelTrainer(
        build_plugins(cfg, names),
        max_steps=options.max_steps,
        max_epochs=options.max_epochs,
        stop_at_step=options.stop_at_step,
        val_every=options.val_every,
        log_every=options.log_every,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        limit_val_batches=options.limit_val_batches,
        non_finite=options.non_finite,
        max_skipped=options.max_skipped,
        seed=cfg.seed,
        checkpoint=build_checkpoint_plan(cfg),
        callbacks=build_callbacks(cfg),
        loggers=build_loggers(cfg),
        timeout_seconds=cfg.launch.timeout_seconds,
    )


def build_checkpoint_plan(cfg: DictConfig) -> CheckpointPlan | None:
    """Returns when the run is saved, None for one that is not."""
    if not cfg.checkpoint.enabled or cfg.mode != "fit":
        return None
    return CheckpointPlan(**{key: value for key, value in plain(cfg.checkpoint).items() if key != "enabled"})


def build_plugins(cfg: DictConfig, names: Sequence[str]) -> dict[str, Config]:
    """Returns each model's DeepSpeed configuration, read from its file where it has one."""
    return {name: read_plugin(f"models.{name}.plugin", plain(cfg.models[name].plugin)) for name in names}


def build_callbacks(cfg: DictConfig) -> dict[str, Callback]:
    """Returns the callbacks by name, in the order of the configuration."""
    return {str(name): make(node) for name, node in cfg.callbacks.items() if node is not None}


def build_loggers(cfg: DictConfig) -> dict[str, Logger]:
    """Returns the loggers by name; ranks other than 0 have none."""
    if not distributed.is_main():
        return {}
    return {str(name): make(node) for name, node in cfg.logger.items() if node is not None}


def build_model_spec(model: ModelConfig) -> ModelSpec:
    """Returns how a model is made and trained."""
    return ModelSpec(
        build=make(model.build, _partial_=True),
        trainable=model.trainable,
        dtype=None if model.dtype == "auto" else getattr(torch, model.dtype),
        optimizer=make(model.optimizer, _partial_=True) if model.optimizer else None,
        scheduler=make(model.scheduler, _partial_=True) if model.scheduler else None,
        max_grad_norm=model.max_grad_norm,
        gradient_accumulation_steps=model.gradient_accumulation_steps,
        plan=UpdatePlan(update_every=model.update_every, start_step=model.start_step, freeze_after=model.freeze_after),
        init_from=model.init_from,
        freeze=list(model.freeze),
        lora=plain(model.lora) if model.lora else None,
    )


def load_tokenizers(cfg: DictConfig) -> dict[str, PreTrainedTokenizerBase]:
    """Returns the tokenizers of the models that bring one, trained models first."""
    ordered = sorted(map(str, cfg.models), key=lambda name: not cfg.models[name].trainable)
    places = {name: tokenizer_name(plain(cfg.models[name].build)) for name in ordered}
    loaded = {place: load_tokenizer(place) for place in dict.fromkeys(places.values()) if place is not None}
    return {name: loaded[place] for name, place in places.items() if place is not None}


def build_tokenizer(
    options: DataConfig, tokenizers: Mapping[str, PreTrainedTokenizerBase], *, own_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of data, once all of its models that bring one are known to share its token ids.

    Args:
        tokenizers: Those of the models that read the data.
        own_tokens: The models that need not share them, since the task translates for them.
    """
    sharing = {name: tokenizer for name, tokenizer in tokenizers.items() if name not in own_tokens}
    problems = check_same_vocabulary(sharing) if sharing else []
    if problems:
        raise ConfigError(*problems)
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    return next(iter([*sharing.values(), *tokenizers.values()]), None)


def build_data(
    cfg: DictConfig,
    key: str,
    options: DataConfig,
    names: list[str],
    *,
    built: Sequence[str],
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    own_tokens: Sequence[str] = (),
) -> TrainingData:
    """Returns the examples to train on and to validate on.

    Args:
        key: Where the options stand: "data", or "models.<name>.data" for a model's own.
        names: The models that read them.
        built: Those that this mode builds, of all models.
        tokenizers: Of all models of the run that bring one.
        own_tokens: The models that may read other token ids.
    """
    read_by = {name: tokenizer for name, tokenizer in tokenizers.items() if name in names}
    tokenizer = build_tokenizer(options, read_by, own_tokens=own_tokens)
    reader: RowReader | None = make(options.rows) if options.rows is not None else None
    _check_sources(cfg, key, options)
    if OmegaConf.is_dict(options.train):
        train = make(options.train)
        validation = make(options.validation) if options.validation is not None else None
        collate, noun = default_collate, "examples"
    else:
        if tokenizer is None:
            raise ConfigError(
                f"{key}.train={options.train} is text, but no model brings a tokenizer; give {key}.tokenizer=<folder>, "
                "or a node with _target_ that returns a dataset of tensors"
            )
        log.info("%s.train: %s, read by %s", key, options.train, ", ".join(name for name in names if name in built))
        train, validation = _read(key, options, tokenizer, reader)
        if reader is not None:
            collate, noun = reader.collator(tokenizer), getattr(reader, "noun", "examples")
        else:
            collate, noun = PaddingCollator(tokenizer.pad_token_id), "text"
    return TrainingData(
        train=train,
        validation=validation,
        batch_size=options.batch_size,
        collate=make(options.collate) if options.collate is not None else collate,
        num_workers=options.num_workers,
        tokenizer=tokenizer,
        noun=noun,
    )


def _read(
    key: str, options: DataConfig, tokenizer: PreTrainedTokenizerBase, reader: RowReader | None
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns the examples of rows to train on and to validate on."""
    load = partial(load_rows, prepare=reader.prepare) if reader is not None else load_rows
    train_rows = load(options.train)
    if options.validation is None:
        with _naming(f"{key}.train={options.train}"):
            train_rows, validation_rows = split_rows(
                train_rows, fraction=options.validation_fraction, seed=options.split_seed
            )
    else:
        train_rows, validation_rows = deduplicate(train_rows), load(options.validation, split="validation")
    make_dataset: Callable[[list[Row]], Dataset[Any]]
    if reader is not None:
        make_dataset = partial(reader.build, tokenizer=tokenizer, block_size=options.block_size)
    else:
        make_dataset = partial(
            build_text_dataset, tokenizer=tokenizer, block_size=options.block_size, packing=options.packing
        )
    held_out = options.validation or f"a part of {options.train}"
    with _naming(f"{key}.train={options.train}"):
        train = make_dataset(train_rows)
    with _naming(f"{key}.validation={held_out}"):
        validation = make_dataset(validation_rows)
    return train, validation


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Says where the rows are from that a message counts."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{place}, {problem}" for problem in error.problems)) from error


def _check_sources(cfg: DictConfig, key: str, options: DataConfig) -> None:
    train, validation = options.train, options.validation
    if validation is None:
        if cfg.mode == "validate" and OmegaConf.is_dict(train):
            raise ConfigError(f"{key}.validation is missing, and mode=validate has nothing else to score; give a node")
    elif OmegaConf.is_dict(train) != OmegaConf.is_dict(validation):
        raise ConfigError(
            f"{key}.train and {key}.validation must be of one kind: both text (a file, a hub name, embedded:<asset>), "
            "or both a node with _target_"
        )


def plain(node: Any) -> Mapping[str, Any]:
    """Returns a node as plain, resolved containers."""
    container: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    return container
