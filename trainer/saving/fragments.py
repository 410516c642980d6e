"""A trained model's weights and optimizer state as named slices: the same whatever the ZeRO stage and the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import distributed
from trainer.handle import ModelHandle, num_elements, own_share
from trainer.plugins import Config
from trainer.saving.checkpoints import CheckpointError
from trainer.saving.plain_state import pack, unpack
from trainer.saving.slices import SliceReader

WEIGHT = "weight"  # the kind of slice that holds a weight, in float32 where the optimizer keeps it so
STATE = "state"  # "state/<key>": the optimizer's numbers that belong to each weight, such as exp_avg
WHOLE = "whole"  # "whole/<key>": those that belong to a matrix as a whole, such as Adafactor's rows
STEP = "step"  # the optimizer's own count, never one per weight


@dataclass(kw_only=True)
class Piece:
    """A stretch of a weight within a flat tensor.

    Args:
        name: The weight's name in the module.
        start: The stretch's first element in the flattened weight.
        offset: And in the flat tensor.
    """

    name: str
    start: int
    offset: int
    numel: int


@dataclass(kw_only=True)
class Flat:
    """What the optimizer holds as one tensor: a weight, or under ZeRO this rank's part of many."""

    tensor: Tensor
    pieces: list[Piece]
    is_shared: bool = False  # whether every rank holds the same
    lp: dict[str, Tensor] = field(default_factory=dict)  # the forward's own copy of each stretch, where it has one

    def cut(self, values: Tensor, piece: Piece) -> Tensor:
        """Returns the stretch of a piece out of values that are laid out like the flat tensor, (numel,)."""
        return values.reshape(-1).narrow(0, piece.offset, piece.numel)

    def fill(self, values: Tensor, piece: Piece, reader: SliceReader, kind: str) -> None:
        """Fills the stretch of a piece in values that are laid out like the flat tensor."""
        whole = (
            values.data if values.is_contiguous() else torch.empty_like(values, memory_format=torch.contiguous_format)
        )
        reader.fill(self.cut(whole, piece), f"{kind}/{piece.name}", start=piece.start)
        if not values.is_contiguous():  # a weight in channels_last: its only piece
            values.data.copy_(whole)

    def holds_elementwise(self, key: str, value: Any) -> bool:
        """Returns whether a value of the optimizer's state is one number per weight."""
        return key != STEP and isinstance(value, Tensor) and value.shape == self.tensor.shape


def find_problem(config: Config) -> str | None:
    """Returns why a trained model under this DeepSpeed configuration cannot be saved, None if it can."""
    zero = config.get("zero_optimization") or {}
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            return f"zero_optimization.{part}.device=nvme: weights on NVMe cannot be saved; use cpu"
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) != 1.0:
        return "zero_optimization.offload_optimizer.ratio: a partly offloaded optimizer cannot be saved; use 1.0"
    if zero.get("zenflow"):
        return "zero_optimization.zenflow: its optimizer cannot be saved; leave it out"
    if zero.get("mics_shard_size", -1) != -1:
        return "zero_optimization.mics_shard_size: weights sharded by MiCS cannot be saved; leave it out"
    return None


# This rank's part ----------------------------------------------------------------------------------------------------


def flats_of(handle: ModelHandle) -> list[Flat]:
    """Returns what this rank's optimizer steps, with the names of what is in it."""
    names = {id(p): name for name, p in handle.module.named_parameters() if p.requires_grad}
    if handle.is_bare:
        return [
            Flat(
                tensor=weight,
                pieces=[Piece(name=names[id(weight)], start=0, offset=0, numel=weight.numel())],
                is_shared=True,
            )
            for weight in handle.trained_weights
        ]
    optimizer: Any = handle.engine.optimizer
    if handle.stage == 3:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        return [_sharded_flat(weights, flat, names) for weights, flat in groups]
    # DeepSpeed has one optimizer for ZeRO-1 and 2, and three for half-precision weights at stage 0.
    match type(optimizer).__name__:
        case "FP16_UnfusedOptimizer":
            return [
                _copied_flat([weight], master, names)
                for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
                for weight, master in zip(weights, masters, strict=True)
            ]
        case "FP16_Optimizer":
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
            return [_copied_flat(weights, flat, names) for weights, flat in groups]
        case "BF16_Optimizer":
            groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)
        case _:
            groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    return [_partitioned_flat(weights, flat, names) for weights, flat in groups]


def _copied_flat(weights: Iterable[nn.Parameter], flat: Tensor, names: Mapping[int, str]) -> Flat:
    """Stage 0 in half precision: every rank has all weights, end to end, in float32 as well."""
    pieces, lp, offset = [], {}, 0
    for weight in weights:
        name = names[id(weight)]
        pieces.append(Piece(name=name, start=0, offset=offset, numel=weight.numel()))
        lp[name] = weight.data.view(-1)
        offset += weight.numel()
    return Flat(tensor=flat, pieces=pieces, is_shared=True, lp=lp)


def _partitioned_flat(weights: Iterable[nn.Parameter], flat: Tensor, names: Mapping[int, str]) -> Flat:
    """ZeRO-1 and 2: a window over all weights laid end to end."""
    pieces = []
    for weight in weights:
        mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            pieces.append(
                Piece(
                    name=names[id(weight)],
                    start=mapping.lp_fragment_address.start,
                    offset=mapping.hp_fragment_address.start,
                    numel=mapping.lp_fragment_address.numel,
                )
            )
    return Flat(tensor=flat, pieces=pieces)


def _sharded_flat(weights: Iterable[nn.Parameter], flat: Tensor, names: Mapping[int, str]) -> Flat:
    """ZeRO-3: a share of every weight, the last ranks' padded."""
    pieces, lp, offset = [], {}, 0
    for weight in weights:
        start, share = own_share(weight)
        if share.numel():
            name = names[id(weight)]
            pieces.append(Piece(name=name, start=start, offset=offset, numel=share.numel()))
            lp[name] = share
        offset += weight.ds_tensor.numel()  # type: ignore[attr-defined]
    return Flat(tensor=flat, pieces=pieces, lp=lp)


def base_optimizer(handle: ModelHandle) -> Optimizer:
    """Returns the optimizer that steps the flat tensors, below DeepSpeed's own."""
    optimizer: Any = handle.engine.optimizer
    base: Optimizer = optimizer if handle.is_bare else optimizer.optimizer
    return base


# Those whose arithmetic is the same for each weight, whatever the shape of what holds it.
_ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop",
    "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "FusedLion", "DeepSpeedCPULion",
}  # fmt: skip


def keeps_shapes(handle: ModelHandle) -> bool:
    """Returns whether the optimizer holds each weight by itself, in its shape, and not many end to end."""
    return handle.is_bare or type(handle.engine.optimizer).__name__ == "FP16_UnfusedOptimizer"


def check_optimizer(handle: ModelHandle, *, kept_shapes: bool) -> None:
    """Raises CheckpointError for an optimizer that may treat a matrix and a row of weights differently."""
    name = type(base_optimizer(handle)).__name__
    if name not in _ELEMENTWISE and kept_shapes != keeps_shapes(handle):
        stages = "ZeRO-1, 2 or 3 to stage 0" if not kept_shapes else f"stage 0 to ZeRO-{handle.stage}"
        raise CheckpointError(
            f"models.{handle.name}: what {name} knows of the weights may depend on their shapes, so it cannot go from "
            f"{stages}; resume with the plugin that the run had"
        )


# Saving --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Slices:
    """This rank's slices of a model, views where they can be, by "<kind>/<weight>"."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of each, in the flattened weight
    scalars: dict[str, Any] = field(default_factory=dict)  # by weight: the optimizer's counts
    numels: dict[str, int] = field(default_factory=dict)  # by weight: the elements of all of it


def slices_of(handle: ModelHandle) -> Slices:
    """Returns what this rank saves of a trained model; no rank waits for another."""
    found, state = Slices(), base_optimizer(handle).state
    numels = _numels_of(handle)
    for index, flat in enumerate(flats_of(handle)):
        values = state.get(flat.tensor, {})
        for piece in flat.pieces:
            saved = _own_share(piece) if flat.is_shared else piece
            found.numels[piece.name] = numels[piece.name]
            if saved.numel:
                _add(found, WEIGHT, saved, flat.cut(flat.tensor.detach(), saved))
                for key, value in values.items():
                    if flat.holds_elementwise(key, value):
                        _add(found, f"{STATE}/{key}", saved, flat.cut(value, saved))
            if values:
                found.scalars[piece.name] = _scalars(handle, flat, values)
        if flat.is_shared and index % distributed.world_size() == distributed.rank():
            for key, value in values.items():
                if _is_whole(flat, key, value):
                    found.tensors[f"{WHOLE}/{key}/{flat.pieces[0].name}"] = value.contiguous()
    return found


def _numels_of(handle: ModelHandle) -> dict[str, int]:
    """Returns the elements of each trained weight, all ranks' together."""
    return {name: num_elements(p) for name, p in handle.module.named_parameters() if p.requires_grad}


def _own_share(piece: Piece) -> Piece:
    """Returns the part of a shared piece that this rank writes."""
    size = -(-piece.numel // distributed.world_size())
    start = min(piece.numel, distributed.rank() * size)
    numel = min(size, piece.numel - start)
    return Piece(name=piece.name, start=piece.start + start, offset=piece.offset + start, numel=numel)


def _add(found: Slices, kind: str, piece: Piece, values: Tensor) -> None:
    key = f"{kind}/{piece.name}"
    found.tensors[key], found.starts[key] = values, piece.start


def _is_whole(flat: Flat, key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and not flat.holds_elementwise(key, value)


def _scalars(handle: ModelHandle, flat: Flat, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if flat.holds_elementwise(key, value):
            continue
        if _is_whole(flat, key, value):
            if not flat.is_shared:
                optimizer = type(base_optimizer(handle)).__name__
                raise CheckpointError(
                    f"models.{handle.name}: {optimizer} keeps '{key}' of shape {tuple(value.shape)}, which does not "
                    f"belong to single weights; under ZeRO-{handle.stage} that cannot be saved"
                )
            continue
        is_tensor = isinstance(value, Tensor)
        number = value.item() if is_tensor else value
        found[key] = {"value": pack(number, {}, name=key), "dtype": _dtype_name(value.dtype) if is_tensor else None}
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(kw_only=True)
class SavedCounts:
    """What belongs to the slices of a model and is no slice.

    Args:
        scalars: By weight, the optimizer's counts.
        numels: By weight, the elements of all of it.
        optimizer: The class of the optimizer.
    """

    scalars: dict[str, Any]
    numels: dict[str, int]
    optimizer: str


def class_of(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer's class, with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# Loading -------------------------------------------------------------------------------------------------------------


def load_slices(handle: ModelHandle, reader: SliceReader, saved: SavedCounts) -> None:
    """Fills a trained model and its optimizer from the slices of any ranks and any stage; all ranks call it."""
    _check_weights(handle, saved.numels)
    optimizer = base_optimizer(handle)
    scalars = saved.scalars if saved.optimizer == class_of(optimizer) else _converted(saved.scalars, optimizer)
    for flat in flats_of(handle):
        for piece in flat.pieces:
            flat.fill(flat.tensor, piece, reader, WEIGHT)
            if piece.name in flat.lp:
                flat.lp[piece.name].data.copy_(flat.cut(flat.tensor.data, piece))
        _load_state(handle, flat, optimizer, reader, scalars)
    _refresh_forward_weights(handle)


def _check_weights(handle: ModelHandle, numels: Mapping[str, int]) -> None:
    own = _numels_of(handle)
    if own == numels:
        return
    differing = next(name for name in [*own, *numels] if own.get(name) != numels.get(name))
    raise CheckpointError(
        f"models.{handle.name}: the weight {differing} has {numels.get(differing, 'no')} trained elements in the "
        f"checkpoint and {own.get(differing, 'none')} in this run; a resumed run keeps its models"
    )


def _load_state(
    handle: ModelHandle, flat: Flat, optimizer: Optimizer, reader: SliceReader, scalars: Mapping[str, Any]
) -> None:
    names = [piece.name for piece in flat.pieces]
    keys = sorted({key for name in names for key in reader.keys_of(STATE, name)})
    counts = _common_scalars(handle, {name: scalars[name] for name in names if name in scalars})
    whole = [(name, key) for name in names for key in reader.keys_of(WHOLE, name)]
    if not (keys or counts or whole):
        optimizer.state.pop(flat.tensor, None)  # the checkpoint is from before the first update
        return
    state = optimizer.state[flat.tensor]
    for key in keys:
        known = state.get(key)
        if not flat.holds_elementwise(key, known):
            name = next(name for name in names if key in reader.keys_of(STATE, name))
            known = torch.zeros_like(flat.tensor, dtype=reader.dtype_of(f"{STATE}/{key}/{name}"))
            state[key] = known
        for piece in flat.pieces:
            if key in reader.keys_of(STATE, piece.name):
                flat.fill(known, piece, reader, f"{STATE}/{key}")
    for name, key in whole:
        state[key] = reader.read(f"{WHOLE}/{key}/{name}").to(flat.tensor.device)
    for key, (value, dtype) in counts.items():
        state[key] = value if dtype is None else _count_tensor(value, dtype, flat, optimizer)


def _converted(scalars: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Returns counts of steps as another optimizer keeps them: torch's in a tensor, DeepSpeed's as a number."""
    dtype = "float32" if type(optimizer).__module__.startswith("torch.optim") else None
    return {
        name: {
            key: count
            if key != STEP
            else {"value": float(count["value"]) if dtype else int(count["value"]), "dtype": dtype}
            for key, count in counts.items()
        }
        for name, counts in scalars.items()
    }


def _common_scalars(handle: ModelHandle, found: Mapping[str, Any]) -> dict[str, tuple[Any, str | None]]:
    """Returns the counts of weights that one flat tensor holds, which can have one only."""
    common: dict[str, tuple[Any, str | None]] = {}
    for name, counts in found.items():
        for key, packed in counts.items():
            value = (unpack(packed["value"], {}), packed["dtype"])
            if common.setdefault(key, value)[0] != value[0]:
                raise CheckpointError(
                    f"models.{handle.name}: its weights have had different numbers of updates ({key} {common[key][0]} "
                    f"and, of {name}, {value[0]}), which ZeRO-{handle.stage} cannot hold; resume with "
                    f"plugin@models.{handle.name}.plugin=zero0"
                )
    return common


def _count_tensor(value: Any, dtype: str, flat: Flat, optimizer: Optimizer) -> Tensor:
    # As torch.optim places it: with the weights only for its kernels that read it there.
    group = optimizer.param_groups[0]
    is_near = group.get("capturable") or group.get("fused")
    return torch.tensor(value, dtype=getattr(torch, dtype), device=flat.tensor.device if is_near else "cpu")


def _refresh_forward_weights(handle: ModelHandle) -> None:
    """Makes the weights that the forward uses follow those that the optimizer holds."""
    if handle.is_bare:
        return
    optimizer: Any = handle.engine.optimizer
    if handle.stage != 3:
        if hasattr(optimizer, "update_lp_params"):  # a partition of the weights: the others' parts come with it
            optimizer.update_lp_params()
        return
    handle.settle()
    if len(optimizer.persistent_parameters) > 0:  # small weights, which every rank keeps whole
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that belong to a module's state, such as running means."""
    named = dict(module.named_buffers())
    for key in module.state_dict(keep_vars=True):
        if key in named:
            yield key, named[key]
