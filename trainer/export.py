"""Writes trained models as folders that others can load, and proves it by loading and scoring them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_model, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer import distributed
from trainer.adapters import adapter_state, is_adapted, load_adapter, save_adapter
from trainer.handle import ModelHandle, gathered_state_dict
from trainer.seeds import seed_everything
from trainer.specs import build_module
from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)

RESCORED_BATCHES = 2  # enough to tell another model by; a long validation set is not gone through again
WEIGHTS, BUILD = "model.safetensors", "build.yaml"


class ExportError(RuntimeError):
    """An exported model is incomplete, or scores otherwise than the one in memory."""


def export_model(
    handle: ModelHandle, folder: Path, *, tokenizer: PreTrainedTokenizerBase | None, build: Mapping[str, Any]
) -> None:
    """Writes a model's weights, whole also when they are sharded; every rank must call it.

    A transformers model becomes a folder for `from_pretrained`, with its tokenizer; another module becomes
    model.safetensors beside build.yaml, the node of the configuration that makes it. Of a model with adapters only
    these are written, as peft does.
    """
    handle.settle()
    module = handle.module
    base = module.get_base_model() if is_adapted(module) else module
    state = adapter_state(module) if is_adapted(module) else gathered_state_dict(module)
    if distributed.is_main():
        _check_complete(handle, state)
        with _replaced(folder) as part:
            if is_adapted(module):
                save_adapter(module, part, state)
            elif isinstance(module, PreTrainedModel):
                module.save_pretrained(part, state_dict=state)
            else:
                save_file(_unshared(state), part / WEIGHTS)
            if not isinstance(base, PreTrainedModel):
                (part / BUILD).write_text(yaml.safe_dump(dict(build), sort_keys=False), encoding="utf-8")
            elif tokenizer is not None:
                tokenizer.save_pretrained(part)
    distributed.barrier()


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, which then takes the place of an export that an earlier part of the run left."""
    part, old = (folder.with_name(f".{folder.name}.{word}") for word in ("part", "old"))
    for left in (part, old):  # of a run that died here
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def rescore(
    trainer: MultiModelTrainer, name: str, folder: Path, *, build: Callable[..., nn.Module], tolerance: float
) -> dict[str, float]:
    """Loads an exported model, scores it in place of the trained one on a few batches, and returns its metrics.

    Raises ExportError when a metric differs by more than `tolerance`, relative.
    """
    trained = trainer.models[name]
    expected, _ = trainer.evaluate(limit_batches=RESCORED_BATCHES)
    if is_adapted(trained.module):
        seed_everything(trainer.seed, name)  # a base model that draws its weights must draw the same again
        finish = partial(load_adapter, folder=folder)
        reloaded = trainer.engines.reload(trained, build, sharded=trained.stage == 3, finish=finish)
    elif isinstance(trained.module, PreTrainedModel):
        load = partial(_load_pretrained, folder, type(trained.module))
        reloaded = trainer.engines.reload(trained, load, sharded=trained.stage == 3)
    else:
        reloaded = trainer.engines.reload(trained, partial(_load_module, folder, build), sharded=False)
    trainer.models[name] = reloaded
    try:
        metrics, _ = trainer.evaluate(limit_batches=RESCORED_BATCHES)
    finally:
        trainer.models[name] = trained
    _check_same(name, folder, expected, metrics, tolerance)
    return metrics


def _load_pretrained(folder: Path, kind: type[PreTrainedModel], dtype: torch.dtype) -> nn.Module:
    # Of the model's own class: a reward model is no causal language model.
    module: nn.Module = kind.from_pretrained(folder, dtype=dtype)
    return module


def _load_module(folder: Path, build: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    module = build_module(build, dtype)
    load_model(module, folder / WEIGHTS)
    return module


def _check_complete(handle: ModelHandle, state: Mapping[str, torch.Tensor]) -> None:
    empty = [key for key, value in state.items() if value.numel() == 0]
    if empty or not state:
        raise ExportError(f"{handle.name}: {len(empty)} of {len(state)} tensors are empty, such as {empty[:1]}")


def _unshared(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors, each stored once: safetensors refuses two names for one storage."""
    seen: set[int] = set()
    kept = {}
    for key, value in state.items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            kept[key] = value.contiguous()
    return kept


def _check_same(
    name: str, folder: Path, before: Mapping[str, float], after: Mapping[str, float], tolerance: float
) -> None:
    for metric, value in before.items():
        # "not within", which a NaN is not either
        if metric in after and not abs(after[metric] - value) <= tolerance * max(abs(value), 1.0):
            raise ExportError(
                f"{name} scores {metric} {value:.6g} in memory, but {after[metric]:.6g} when loaded from {folder}; "
                f"the largest difference allowed is export.tolerance={tolerance}"
            )
