"""Start weights that one model takes from another: which order that asks for, and the copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def find_origin_problems(origins: Mapping[str, str | None]) -> list[str]:
    """Returns what is wrong with the models that others start from.

    Args:
        origins: Name of each model to the one whose start weights it takes, None for its own.
    """
    problems = []
    for name, origin in origins.items():
        if origin is not None and origin not in origins:
            others = ", ".join(other for other in origins if other != name) or "none"
            problems.append(f"models.{name}.init_from={origin}: models has no {origin}; others are: {others}")
        elif origin is not None and name in _line(origins, origin):
            problems.append(
                f"models.{name}.init_from={origin}: {origin} starts from {name} itself, in a circle; let one of them "
                "start from its own build"
            )
    return problems


def build_order(origins: Mapping[str, str | None]) -> list[str]:
    """Returns the names in an order in which every model comes after the one that it starts from."""
    return sorted(origins, key=lambda name: len(_line(origins, name)))


def _line(origins: Mapping[str, str | None], name: str) -> list[str]:
    """Returns a model and those that it descends from; a circle ends where it closes."""
    line = [name]
    while (origin := origins.get(line[-1])) is not None and origin not in line:
        line.append(origin)
    return line


def copy_start_weights(target: nn.Module, source: nn.Module, *, name: str, origin: str) -> nn.Module:
    """Gives a module all weights and buffers of another, each of them sharded or whole; every rank must call it.

    Of one with adapters those of its base model, which is what it starts as.

    Args:
        name: The target's role, and `origin` the source's, for people.
    """
    import torch
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from torch import nn

    from trainer.config import ConfigError
    from trainer.handle import full_shape, is_sharded

    theirs, ours = _base_weights(source), target.state_dict(keep_vars=True)
    for key in sorted(theirs.keys() | ours.keys()):
        shapes = [tuple(full_shape(state[key])) if key in state else None for state in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"models.{name}.init_from={origin}: {key} is {shapes[0] or 'absent'} in {name} and "
                f"{shapes[1] or 'absent'} in {origin}; both builds must make the same model"
            )
    for key, value in theirs.items():
        sharded = [w for w in (value, ours[key]) if isinstance(w, nn.Parameter) and is_sharded(w)]
        # Every rank writes the same into the whole weight; rank 0's is what is partitioned again.
        with torch.no_grad(), GatheredParameters(sharded, modifier_rank=0):
            ours[key].data.copy_(value.data)
    return target


def _base_weights(module: nn.Module) -> dict[str, Any]:
    """Returns weights and buffers by the names that they have without adapters."""
    from trainer.adapters import is_adapted

    if not is_adapted(module):
        return module.state_dict(keep_vars=True)
    state = module.get_base_model().state_dict(keep_vars=True)
    return {
        key.replace(".base_layer.", ".").replace(".original_module.", "."): value
        for key, value in state.items()
        if not any(part.startswith("lora_") or part == "modules_to_save" for part in key.split("."))
    }
