"""Inner activations of a model, by module path, as a part of its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer import ConfigError, ModelHandle, did_you_mean


def tapped_forward(
    model: ModelHandle, inputs: Mapping[str, Any], paths: Sequence[str]
) -> tuple[Any, dict[str, Tensor]]:
    """Returns a model's output, and its modules' by path.

    Both come through the wrapper's forward as one output, so that a loss of the inner states alone trains the model
    like any other.

    Args:
        inputs: The keyword arguments of its forward.
        paths: As in `find_module`.
    """
    with captured(model, paths) as states, replaced_output(model.module, lambda output: (output, states)):
        output, hidden = model(**inputs)
    return output, hidden


@contextmanager
def captured(model: ModelHandle, paths: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Within it, a forward of the model fills the mapping that it gives: path to the module's output.

    Of several outputs it is the first; of a module that runs several times, its last. The tensors are those that the
    model itself goes on with, and reach a loss only as part of its output, see `replaced_output`.
    """
    states: dict[str, Tensor] = {}
    # After the hooks of DeepSpeed, which gather sharded weights before a gradient comes to what they return.
    hooks = [
        find_module(model, path).register_forward_hook(_keep(model, path, states)) for path in dict.fromkeys(paths)
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _keep(model: ModelHandle, path: str, states: dict[str, Tensor]) -> Callable[..., None]:
    has_graph = torch.is_grad_enabled() and model.trainable and not model.has_ended

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        while isinstance(output, Mapping | tuple | list):
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        if not isinstance(output, Tensor):
            raise TypeError(f"{path} returns {type(output).__name__}; name a module that returns a tensor")
        if has_graph and not torch.is_grad_enabled():  # or it would be a constant of the loss
            raise ValueError(f"{path} runs without a graph; gradient checkpointing needs use_reentrant=False")
        states[path] = output

    return hook


@contextmanager
def replaced_output(module: nn.Module, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, the module returns what `replace` makes of its output, and all of its other hooks see that."""
    hook = module.register_forward_hook(lambda module, inputs, output: replace(output), prepend=True)
    try:
        yield
    finally:
        hook.remove()


def find_module(model: ModelHandle, path: str) -> nn.Module:
    """Returns the module at a path such as "model.layers.-1.self_attn.q_proj"; raises ConfigError with the nearest.

    A negative number counts from the end of a list of modules. A path of a model with adapters is that of the model
    without.
    """
    root = base_model(model.module)
    module = root
    for part in path.split("."):
        children = dict(module.named_children())
        if part.startswith("-") and part[1:].isdigit() and isinstance(module, nn.ModuleList | nn.Sequential):
            part = str(len(children) + int(part))
        if part not in children:
            raise ConfigError(f"models.{model.name} has no module {path!r}{_hint(root, path)}")
        module = children[part]
    return module


def base_model(module: nn.Module) -> nn.Module:
    """Returns the model under peft's adapters, or the module itself."""
    if "peft" not in sys.modules:  # its import takes half a second, and may warn
        return module
    from peft import PeftModel

    return module.get_base_model() if isinstance(module, PeftModel) else module


def _hint(root: nn.Module, path: str) -> str:
    names = [name for name, _ in root.named_modules() if name]
    return did_you_mean(path, names) or f"; it has {', '.join(dict(root.named_children()))}"
