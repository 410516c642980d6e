"""What a checkpoint of a run holds: taken from the trainer by all ranks, and given back to one that goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer import distributed
from trainer.config import ConfigError
from trainer.plugin_keys import AUTO
from trainer.saving.checkpoints import CheckpointError, find_damage, read_json, read_manifest, step_of, write_text
from trainer.saving.fragments import (
    SavedCounts,
    base_optimizer,
    buffers_of,
    check_optimizer,
    class_of,
    keeps_shapes,
    load_slices,
    slices_of,
)
from trainer.saving.plain_state import pack, unpack
from trainer.saving.slices import SliceReader, write_slices
from trainer.specs import keywords_of

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)

SHARED = "trainer.json"  # what all ranks have in common, written by rank 0
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")  # of an engine
_OF_THE_MACHINE = ("params", "foreach", "fused", "capturable", "differentiable")  # in an optimizer's groups


@dataclass(kw_only=True)
class Content:
    """What one rank writes: small files as text, and tensors by the start of their files' names."""

    texts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, tuple[dict[str, Tensor], dict[str, int]]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of it, without what files add to their tensors."""
        tensors = sum(value.nbytes for part, _ in self.tensors.values() for value in part.values())
        return tensors + sum(len(text) for text in self.texts.values())

    def copied(self) -> Content:
        """Returns the same, with tensors of its own in the memory of the host."""
        copies = {
            prefix: ({key: value.detach().to("cpu", copy=True) for key, value in part.items()}, starts)
            for prefix, (part, starts) in self.tensors.items()
        }
        return Content(texts=self.texts, tensors=copies)

    def write(self, folder: Path) -> list[str]:
        """Writes everything and returns the files' names."""
        names = list(self.texts)
        for name, text in self.texts.items():
            write_text(folder / name, text)
        for prefix, (part, starts) in self.tensors.items():
            (folder / prefix).parent.mkdir(parents=True, exist_ok=True)
            names += write_slices(folder, prefix, part, starts)
        return names


def versions() -> dict[str, str]:
    """Returns the versions of what a run's numbers depend on."""
    return {name: version(name) for name in ("torch", "deepspeed", "accelerate", "transformers")}


# Taking --------------------------------------------------------------------------------------------------------------


def take(trainer: MultiModelTrainer) -> Content:
    """Returns what this rank writes; tensors are views of what the models hold, not copies. All ranks call it."""
    content, rank = Content(), f"rank-{trainer.rank:05d}"
    own: dict[str, Any] = {"models": {}}
    for model in trainer.trained:
        slices = slices_of(model)
        content.tensors[f"models/{model.name}/{rank}"] = (slices.tensors, slices.starts)
        own["models"][model.name] = {"scalars": slices.scalars, "numels": slices.numels}
        buffers = {key: value.detach().contiguous() for key, value in buffers_of(model.module)}
        if buffers:
            content.tensors[f"models/{model.name}/buffers-{trainer.rank:05d}"] = (buffers, {})
    tensors: dict[str, Tensor] = {}
    states = {
        name: {"class": type(callback).__qualname__, "state": callback.state_dict()}
        for name, callback in trainer.callbacks.items()
    }
    own["callbacks"] = pack(states, tensors, name="callbacks")
    own["task"] = pack(trainer.task.state_dict(), tensors, name="task")
    own["rollout"] = pack(trainer.rollouts.state_dict(), tensors, name="rollout")
    content.texts[f"{rank}.json"] = _dump(own)
    if tensors:
        content.tensors[rank] = (tensors, {})
    if trainer.is_main:
        content.texts |= {SHARED: _dump(_shared_state(trainer)), **trainer.checkpoint_texts}
    return content


def _dump(state: Any) -> str:
    return json.dumps(state, allow_nan=False, separators=(",", ":")) + "\n"


def _shared_state(trainer: MultiModelTrainer) -> dict[str, Any]:
    return {
        "global_step": trainer.global_step,
        "seed": trainer.seed,
        "max_steps": trainer.max_steps,
        "trainer": pack(trainer.progress(), {}, name="trainer"),
        "models": {model.name: _model_state(model) for model in trainer.trained},
        "fixed_weights": trainer.fixed_weights,
        "data": trainer.data_identity,
        "positions": trainer.log_positions(),
    }


def _model_state(model: ModelHandle) -> dict[str, Any]:
    engine: Any = model.engine
    schedule = model.scheduler if model.scheduler is not None else engine.lr_scheduler
    scaler = _loss_scaler(engine.optimizer)
    state = {
        "counts": model.counts(),
        "optimizer": class_of(base_optimizer(model)),
        "keeps_shapes": keeps_shapes(model),
        "engine": {name: getattr(engine, name) for name in _COUNTERS},
        "groups": [
            {key: value for key, value in group.items() if key not in _OF_THE_MACHINE}
            for group in base_optimizer(model).param_groups
        ],
        "schedule": schedule.state_dict() if schedule is not None else None,
        "loss_scaler": {key: value for key, value in vars(scaler).items() if _is_number(value)} if scaler else {},
    }
    tensors: dict[str, Tensor] = {}
    packed: dict[str, Any] = pack(state, tensors, name=f"models.{model.name}")
    if tensors:
        raise CheckpointError(f"{next(iter(tensors))} is a tensor, for which a checkpoint has no place")
    return packed


def _loss_scaler(optimizer: Any) -> Any:
    """Returns what a DeepSpeed optimizer keeps the loss scale of float16 in, None where there is none."""
    return getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


# Giving back ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A checkpoint of which every byte was checked."""

    path: Path


Checkpoint: TypeAlias = Path | Whole | None  # what a run may go on from


def choose(candidates: Iterable[Path]) -> Whole:
    """Returns the first whole checkpoint, every byte of it checked against its manifest; all ranks share the work.

    Nothing is deserialised. A damaged one is named and left out; ConfigError where none is whole.
    """
    damages: list[str] = []
    for path in candidates:
        found = distributed.gather(find_damage(path, rank=distributed.rank(), world_size=distributed.world_size()))
        damage = next((text for text in found if text is not None), None)
        if damage is None:
            if damages and distributed.is_main():
                log.warning("%s; going on from %s", "; ".join(damages), path.name)
            return Whole(path.resolve())  # a link such as `last` will lead to another one
        damages.append(damage)
    raise ConfigError(f"resume: no whole checkpoint is left ({'; '.join(damages)})")


def positions_of(path: Path) -> dict[str, dict[str, int]]:
    """Returns how far each logger was when a checkpoint was saved."""
    positions: dict[str, dict[str, int]] = read_json(path, SHARED)["positions"]
    return positions


def give_back(trainer: MultiModelTrainer, path: Path) -> None:
    """Makes a prepared trainer go on from a checkpoint that `choose` has checked; all ranks call it."""
    shared = read_json(path, SHARED)
    with _readable(path):
        if shared["global_step"] != step_of(path):
            raise CheckpointError(f"{path}: {SHARED} is of step {shared['global_step']}")
        _check_same(trainer, shared)
        check_data(path, trainer.data_identity)
        manifest = read_manifest(path)
        _tell_versions(manifest["versions"])
        ranks = int(manifest["world_size"])
        by_rank = [read_json(path, f"rank-{rank:05d}.json") for rank in range(ranks)]
        for model in trainer.trained:
            _give_back_model(model, path, by_rank, shared["models"][model.name], trainer.horizons.get(model.name, ()))
        own = trainer.rank if ranks == trainer.world_size else 0
        tensors = _tensors(sorted(path.glob(f"rank-{own:05d}-*.safetensors")))
        callbacks, task = (unpack(by_rank[own][part], tensors) for part in ("callbacks", "task"))
        if ranks == trainer.world_size:
            trainer.rollouts.load_state_dict(unpack(by_rank[own].get("rollout", {}), tensors))
        trainer.go_on(shared["global_step"], unpack(shared["trainer"], {}))
        _tell_horizon(trainer, shared["max_steps"])
    for name, callback in trainer.callbacks.items():
        if name not in callbacks:  # it was added
            continue
        if callbacks[name]["class"] == type(callback).__qualname__:
            callback.load_state_dict(callbacks[name]["state"])
        elif distributed.is_main():
            log.warning("callbacks.%s was a %s: it begins anew", name, callbacks[name]["class"])
    trainer.task.load_state_dict(task)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold what a checkpoint of this version does: {error!r}") from error


def _tell_versions(saved: Mapping[str, str]) -> None:
    changed = [
        f"{name} {saved.get(name)} instead of {now}" for name, now in versions().items() if saved.get(name) != now
    ]
    if changed and distributed.is_main():
        log.warning("the checkpoint was saved with %s: numbers may differ in their last bits", ", ".join(changed))


def _tell_horizon(trainer: MultiModelTrainer, saved: int) -> None:
    moved = [name for name, keys in trainer.horizons.items() if keys]
    if saved != trainer.max_steps and moved and distributed.is_main():
        names = ", ".join(moved)
        log.warning("%d steps instead of %d: the schedules of %s are laid out anew", trainer.max_steps, saved, names)


def check_data(path: Path, identities: Mapping[str, Any]) -> None:
    """Raises ConfigError for every set of examples that is not what the run began with."""
    problems, saved = [], read_json(path, SHARED)["data"]
    for key, identity in identities.items():
        before = saved.get(key, identity)
        if before["examples"] != identity["examples"]:
            what = f"{identity['examples']} examples, and the run began with {before['examples']}"
        else:
            what = "other examples than the run began with"
        if before != identity:
            problems.append(f"{key}: holds {what}; put the data back as they were, or start a new run")
    if problems:
        raise ConfigError(*problems)


def _check_same(trainer: MultiModelTrainer, shared: Mapping[str, Any]) -> None:
    """Raises ConfigError for every part of the run that is not what it was."""
    problems = []
    if shared["seed"] != trainer.seed:
        problems.append(f"seed={trainer.seed}: the run that is resumed has {shared['seed']}")
    trained = [model.name for model in trainer.trained]
    if sorted(trained) != sorted(shared["models"]):
        problems.append(f"models: {', '.join(trained)} are trained, but {', '.join(shared['models'])} were")
    for name, digest in trainer.fixed_weights.items():
        saved = shared["fixed_weights"].get(name)
        if saved is not None and saved != digest:
            problems.append(
                f"models.{name}: its frozen weights are not those that the run began with; give the same weights, and "
                "where they are random the same plugin"
            )
    if problems:
        raise ConfigError(*problems)


def _give_back_model(
    model: ModelHandle, path: Path, by_rank: list[Any], shared: Mapping[str, Any], horizon: Iterable[str]
) -> None:
    folder = path / "models" / model.name
    counts = SavedCounts(scalars={}, numels={}, optimizer=shared["optimizer"])
    for rank in by_rank:
        counts.scalars |= rank["models"][model.name]["scalars"]
        counts.numels |= rank["models"][model.name]["numels"]
    check_optimizer(model, kept_shapes=shared["keeps_shapes"])
    with SliceReader(sorted(folder.glob("rank-*.safetensors"))) as reader:
        load_slices(model, reader, counts)
    own = distributed.rank() if len(by_rank) == distributed.world_size() else 0
    saved = _tensors(sorted(folder.glob(f"buffers-{own:05d}-*.safetensors")))
    for key, buffer in buffers_of(model.module):
        if saved[key].shape != buffer.shape:
            raise CheckpointError(f"models.{model.name}: the buffer {key} has another shape in the checkpoint")
        buffer.copy_(saved[key])
    state = unpack(shared, {})
    for group, values in zip(base_optimizer(model).param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key in group})
    _give_back_schedule(model, state["schedule"], horizon)
    engine: Any = model.engine
    for name, value in state["engine"].items():
        setattr(engine, name, value)
    scaler = _loss_scaler(engine.optimizer)
    for name, value in state["loss_scaler"].items():
        if hasattr(scaler, name):  # another stage may have none
            setattr(scaler, name, value)
    model.load_counts(state["counts"])


def _give_back_schedule(model: ModelHandle, state: dict[str, Any] | None, horizon: Iterable[str]) -> None:
    schedule: Any = model.scheduler if model.scheduler is not None else model.engine.lr_scheduler
    if schedule is not None and state is not None:
        # The number of updates that it is laid out over is this run's, which may have been lengthened.
        schedule.load_state_dict({key: value for key, value in state.items() if key not in set(horizon)})


def horizon_keys(scheduler: Any) -> list[str]:
    """Returns the arguments of a schedule that are filled with the run's number of updates."""
    return [] if scheduler is None else [key for key, value in keywords_of(scheduler).items() if value == AUTO]


def _tensors(files: list[Path]) -> dict[str, Tensor]:
    try:
        return {key: value for file in files for key, value in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{files[0].parent} holds a file that is not of safetensors ({error})") from error
