"""Which losses train which models, and the backward that reaches these and no others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from trainer.handle import ModelHandle
from trainer.task import JOINT
from trainer.window import owner


def receivers(keys: Iterable[str], trained: Sequence[ModelHandle]) -> dict[str, list[ModelHandle]]:
    """Returns, for each owner of a loss, the models that it trains in this window.

    A model's own loss trains that model; "joint" trains those that have none of their own. Models that are not updated
    in this window are left out. Raises ValueError when a model is left without a loss, or a joint loss without models
    that step together.
    """
    owners = {owner(key) for key in keys}
    groups = {model.name: [model] for model in trained if model.name in owners and model.is_updating}
    others = [model for model in trained if model.name not in owners]
    updating = [model for model in others if model.is_updating]
    if JOINT in owners and not others:
        raise ValueError(
            f"training_step returned '{JOINT}', but {_listed(owners - {JOINT})} have losses of their own, which leaves "
            f"it no model to train; a model is trained by one of them: name such a term '{JOINT}/<term>'"
        )
    if JOINT in owners and updating:
        _check_group(updating)
        groups[JOINT] = updating
    elif updating:
        raise ValueError(
            f"training_step returned no loss for the trained model '{updating[0].name}', only for {_listed(owners)}; "
            f"return one in every micro-batch, or set models.{updating[0].name}.trainable=false"
        )
    return groups


def _check_group(group: Sequence[ModelHandle]) -> None:
    sizes = {model.name: model.accumulation for model in group}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"a joint loss trains models that step together, but their gradient_accumulation_steps differ: "
            f"{', '.join(f'models.{name} {size}' for name, size in sizes.items())}; set them alike"
        )
    half = [model.name for model in group if model.dtype == torch.float16]
    if half and len(group) > 1:
        raise ValueError(
            f"models.{half[0]} is float16: its loss scale would multiply the gradients of every model of the joint "
            f"loss ({_listed(model.name for model in group)}); set models.{half[0]}.dtype=bfloat16 or float32"
        )
    alone = [model.name for model in group if model.stage == 0 and not model.is_plain and model.dtype != torch.bfloat16]
    if alone and len(group) > 1:
        raise ValueError(
            f"models.{alone[0]} is ZeRO-0 with torch_autocast, whose engine takes part in no other engine's backward; "
            f"use plugin@models.{alone[0]}.plugin=zero1"
        )


class Backward:
    """One backward of one loss: it adds to the gradients of its receivers, and to no other model's.

    Args:
        key: The owner of the loss: a model's name or "joint".
        group: The models that it trains.
        trained: All trained models.
    """

    def __init__(self, key: str, *, group: Sequence[ModelHandle], trained: Sequence[ModelHandle]) -> None:
        self.key, self.group, self.trained = key, group, trained

    def run(self, loss: Tensor) -> None:
        """Backpropagates; raises ValueError when the loss misses a model of its group, or passes through another."""
        # Before the backward: DeepSpeed's engines stumble over one that never comes to their outputs.
        for model in _unreached(loss, self.group):
            raise ValueError(
                f"the loss '{self.key}' does not depend on the output of models.{model.name}, which it should train: "
                f"compute it from self.models['{model.name}'](...), not from its module, a detached tensor or under "
                "no_grad"
            )
        for model in self.trained:
            model.on_gradient = None if model in self.group else self._refuse
        try:
            # One backward through several engines may be called on any of them that is DeepSpeed's.
            leader = next((model for model in self.group if not model.is_plain), self.group[0])
            with self._only_receivers():
                leader.backward(loss)
        except RuntimeError as error:
            _explain(error, self.key)
            raise
        finally:
            for model in self.trained:
                model.on_gradient = None

    def _only_receivers(self) -> AbstractContextManager[Any]:
        if len(self.trained) == 1:
            return nullcontext()
        return _Only([weight for model in self.group for weight in model.trained_weights])

    def _refuse(self, name: str) -> None:
        """Hears that the gradient has come to the output of another model; raising here ends the backward at once."""
        raise ValueError(
            f"the loss '{self.key}' passes through models.{name}, which it does not train; call "
            f"self.models['{name}'].module(...) where it only passes, or return one loss for both, '{JOINT}'"
        )


def _unreached(loss: Tensor, group: Sequence[ModelHandle]) -> list[ModelHandle]:
    """Returns the models whose outputs the loss does not depend on; looks no further once all are found."""
    owners = {node: model.name for model in group for node in model.output_nodes}
    missing = {model.name for model in group}
    start = get_gradient_edge(loss).node
    queue, seen = deque([start]), {start}
    while queue and missing:
        node = queue.popleft()
        missing.discard(owners.get(node, ""))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return [model for model in group if model.name in missing]


class _Only(TorchFunctionMode):
    """Lets a backward add to the gradients of some weights only; DeepSpeed's engines have no argument for it.

    What does not lead to these weights is not even computed, so that a forward may serve several losses.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is Tensor.backward:
            arguments["inputs"] = self.weights
        return func(*args, **arguments)


def _explain(error: RuntimeError, key: str) -> None:
    """Adds what the task can do about torch's errors on graphs that several losses share."""
    if "backward through the graph a second time" in str(error):
        error.add_note(
            f"the loss '{key}' shares a forward with another loss that was backpropagated before it; give one of them "
            "a forward of its own, with the input detached, or add them up as one loss"
        )
    elif "`inputs` parameter" in str(error):
        error.add_note("with several trained models, gradient checkpointing needs use_reentrant=False")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
