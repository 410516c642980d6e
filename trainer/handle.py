"""One model of a run: called like the model, stepped by the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer import distributed
from trainer.discard import discard_gradients
from trainer.gathering import fits_whole, forget_order, whole_weights
from trainer.plugins import Config, stage_of
from trainer.updates import UpdatePlan


class ModelHandle:
    """A model under its own plugin.

    Args:
        engine: The DeepSpeed engine, or the module itself for a replicated frozen model.
        config: The resolved DeepSpeed configuration, None without an engine.
        accumulation: Micro-batches per update.
        plan: The windows in which its losses count.
        optimizer: The one that was given to the engine or that the engine made from its configuration.
        scheduler: Stepped here once per applied update; None when the engine steps its own.
        schedule: The scheduler's name, for people.
        select: Makes this model's plugin the active one for a while.
    """

    def __init__(
        self,
        name: str,
        *,
        engine: nn.Module,
        module: nn.Module,
        trainable: bool,
        config: Config | None,
        accumulation: int,
        plan: UpdatePlan,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        schedule: str,
        select: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.name, self.engine, self.module, self.trainable = name, engine, module, trainable
        self.config, self.accumulation, self.plan = config, accumulation, plan
        self.optimizer, self.scheduler, self.schedule = optimizer, scheduler, schedule
        self.is_bare = trainable and _is_bare(config, module)
        self.is_plain = self.is_bare and not _uses_autocast(config)
        self.trained_weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.is_updating = trainable  # whether its losses count in the current window
        self.has_ended = False  # whether its plan keeps its weights as they are from here on
        self.num_updates = 0
        self.num_skipped = 0  # updates that were left out, since a loss or gradient was not finite
        self.skipped_in_a_row = 0  # of these, those since the last one that was applied
        self.output_nodes: set[Node] = set()  # where its outputs of this micro-batch stand in the graph
        self.on_gradient: Callable[[str], None] | None = None  # told when a gradient comes to one of them
        self._select = select
        self._used_lr: float | None = None
        self._grad_norm: float | None = None
        self._was_applied = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs, through the wrapper that gathers sharded weights; frozen: without a graph.

        A gradient *through* a model that the loss does not train, to its inputs, goes by `handle.module(...)`.
        """
        if not self.trainable or self.has_ended:
            if self.module.training:  # a task may have called train() on it
                self.module.eval()
            with torch.no_grad():
                return self.engine(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.engine(*args, **kwargs)
        # An engine's own forward makes the backward through it the engine's: not while its losses do not count. And
        # DeepSpeed's at stage 0 allows one in which it alone takes part.
        run = self.engine if self.is_updating and not self.is_plain else self.module
        output = run(*args, **kwargs)
        for tensor in _tensors_with_graph(output):
            tensor.register_hook(self._hear_gradient)  # type: ignore[no-untyped-call]
            self.output_nodes.add(get_gradient_edge(tensor).node)
        return output

    def _hear_gradient(self, gradient: Tensor) -> None:
        if self.is_updating and self.on_gradient is not None:
            self.on_gradient(self.name)

    def generate(self, *, gather: Literal["auto"] | bool = "auto", **kwargs: Any) -> Tensor:
        """Returns token ids, (B, T), as transformers' `generate`, in evaluation mode; every rank must call it.

        Args:
            gather: Whether the weights of a ZeRO-3 model are gathered once for the whole call, or layer by layer for
                each token; "auto": once where all ranks have the memory. Other models have them whole.
            kwargs: Of `generate`.
        """
        is_sharded, is_whole = self.stage == 3, gather is True
        if is_sharded and gather == "auto":
            is_whole = fits_whole(self.module, device=self.device)
        whole = whole_weights(self.engine, self.module) if is_sharded and is_whole else nullcontext()
        # Layer by layer, ranks that stop early must go on helping the others.
        synced = is_sharded and not is_whole and distributed.world_size() > 1
        try:
            with self.evaluating(), self.selected(), torch.no_grad(), whole:
                return self.module.generate(synced_gpus=synced, **kwargs)  # type: ignore[operator,no-any-return]
        finally:
            if is_sharded and not is_whole:
                forget_order(self.engine)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has the model in evaluation mode for a while."""
        was_training = self.module.training
        self.set_training(False)
        try:
            yield
        finally:
            self.set_training(was_training)

    @contextmanager
    def resident(self, device: torch.device) -> Iterator[None]:
        """Has the weights of a replicated frozen model on a device, and in host memory before and after it."""
        assert self.stage is None, f"{self.name} is no replica"
        values = [*self.module.parameters(), *self.module.buffers()]
        waiting = [value.data.cpu() for value in values]  # as they are, from the second time on
        for value, here in zip(values, waiting, strict=True):
            value.data = here.to(device)
        try:
            yield
        finally:
            for value, here in zip(values, waiting, strict=True):
                value.data = here

    def selected(self) -> AbstractContextManager[None]:
        """Returns a context in which this model's plugin is the active one."""
        return self._select(self.name)

    # What the trainer does with it -----------------------------------------------------------------------------------

    def enter_window(self, step: int) -> None:
        """Says that the window of a global step begins: whether the model's losses count in it follows."""
        self.is_updating = self.trainable and self.plan.counts_in(step)
        if self.trainable and not self.has_ended and self.plan.has_ended(step):
            self.has_ended = True
            self.module.eval()

    def set_boundary(self, is_boundary: bool) -> None:
        """Says, before a forward, whether its backward is the last one before the update."""
        self.engine.set_gradient_accumulation_boundary(is_boundary)  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        """Backpropagates a loss that carries its weight in the global batch."""
        if self.is_plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.engine.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]

    def step(self) -> None:
        """Clips, updates, zeroes the gradients and moves the schedule on, unless the gradients are not finite."""
        assert self.optimizer is not None, f"{self.name} is frozen"
        self._used_lr = float(self.optimizer.param_groups[0]["lr"])
        if self.is_plain:
            self.engine.allreduce_gradients()  # type: ignore[operator]
        norm = self._norm_of_bare_gradients()
        if norm is not None and not math.isfinite(norm):
            self._grad_norm = norm
            self.discard()
            return
        self.engine.step()  # type: ignore[operator]
        self._grad_norm = self._norm_of_engine() if norm is None else norm
        if not self.engine.was_step_applied():  # type: ignore[operator]
            if self._grad_norm is None or math.isfinite(self._grad_norm):
                self._grad_norm = math.inf  # some of DeepSpeed's optimizers keep the one before
            self.discard()
            return
        self._was_applied, self.skipped_in_a_row = True, 0
        self.num_updates += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def discard(self) -> None:
        """Drops the gradients of an update that must not happen; to be called in the place of `step`.

        The schedule does not move, and neither does the loss scale, unless the engine itself skipped the update.
        """
        discard_gradients(self.engine)
        self._was_applied = False
        self.num_skipped += 1
        self.skipped_in_a_row += 1

    def was_update_applied(self) -> bool:
        """Returns whether the last update was applied; one with losses or gradients that are not finite is not."""
        return self._was_applied

    def _norm_of_bare_gradients(self) -> float | None:
        """Returns the norm before the update where no DeepSpeed optimizer looks at it: ZeRO-0 in float32."""
        # A scaler, of torch_autocast in float16, multiplied them and skips by itself.
        if not self.is_bare or self.engine.torch_autocast_z0_gradscaler is not None:
            return None
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def _norm_of_engine(self) -> float | None:
        norm = self.engine.get_global_grad_norm()  # type: ignore[operator]
        if norm is None:
            return None
        return float(norm) if norm >= 0 else math.nan  # DeepSpeed's sign of one that is not finite: -1

    def set_training(self, mode: bool) -> None:
        """Puts a trained model into training or evaluation mode; a frozen one is always in evaluation mode."""
        self.module.train(mode and self.trainable and not self.has_ended)

    def settle(self) -> None:
        """Partitions all weights of a ZeRO-3 model, also those that a validation prefetched for a step that never came.

        Gathering such a weight fails; every rank must call it.
        """
        if self.stage == 3:
            self.engine.empty_partition_cache()  # type: ignore[operator]

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, None without an engine."""
        return None if self.config is None else stage_of(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights that the forward uses."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """Where it computes; the weights themselves may be offloaded."""
        if self.config is None:
            return next((p.device for p in self.module.parameters()), torch.device("cpu"))
        return self.engine.device  # type: ignore[return-value]

    @property
    def num_parameters(self) -> int:
        """The number of weights of the whole model, sharded or not."""
        return sum(num_elements(parameter) for parameter in self.module.parameters())

    @property
    def num_trainable(self) -> int:
        """The number of weights that receive a gradient."""
        return sum(num_elements(parameter) for parameter in self.module.parameters() if parameter.requires_grad)

    def local_bytes(self) -> int:
        """Returns the memory that this rank's part of the weights takes, in bytes."""
        return sum(local.numel() * local.element_size() for local in self.local_weights())

    def local_weights(self) -> Iterator[Tensor]:
        """Yields this rank's part of each weight: all of it, or its ZeRO-3 partition."""
        for parameter in self.module.parameters():
            yield parameter.ds_tensor if is_sharded(parameter) else parameter.data  # type: ignore[attr-defined]

    def loss_scale(self) -> float | None:
        """Returns what the engine multiplies the losses by, None unless the model is float16."""
        if self.dtype != torch.float16 or not self.trainable:
            return None
        return float(self.engine.optimizer.loss_scale)  # type: ignore[union-attr, arg-type]

    def learning_rate(self) -> float | None:
        """Returns the rate of the last update."""
        return self._used_lr

    def grad_norm(self) -> float | None:
        """Returns the norm of the last update's gradient over all ranks, before clipping."""
        return self._grad_norm

    def counts(self) -> dict[str, Any]:
        """Returns what it counts and shows of its updates."""
        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "has_ended": self.has_ended,
            "used_lr": self._used_lr,
            "grad_norm": self._grad_norm,
        }

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """Takes back what `counts` returned."""
        self.num_updates, self.num_skipped = counts["num_updates"], counts["num_skipped"]
        self.skipped_in_a_row, self.has_ended = counts["skipped_in_a_row"], counts["has_ended"]
        self._used_lr, self._grad_norm = counts["used_lr"], counts["grad_norm"]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Returns whether ZeRO-3 holds the parameter in partitions."""
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    return bool(is_zero_param(parameter))


def _is_bare(config: Config | None, module: nn.Module) -> bool:
    """Returns whether the engine is no more than data parallelism: no DeepSpeed optimizer holds the gradients."""
    if config is None or stage_of(config) != 0:
        return False
    return all(parameter.dtype == torch.float32 for parameter in module.parameters() if parameter.is_floating_point())


def _uses_autocast(config: Config | None) -> bool:
    return config is not None and bool(config.get("torch_autocast", {}).get("enabled", False))


def _tensors_with_graph(output: Any) -> Iterator[Tensor]:
    """Yields the tensors of a model's output that carry a graph, through mappings, lists and tuples."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_with_graph(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors_with_graph(value)


def full_shape(value: Tensor) -> torch.Size:
    """Returns the shape of a whole weight or buffer, also where this rank holds a partition of it."""
    sharded = isinstance(value, nn.Parameter) and is_sharded(value)
    return value.ds_shape if sharded else value.shape  # type: ignore[attr-defined]


def num_elements(parameter: nn.Parameter) -> int:
    """Returns the size of the whole parameter; ZeRO-3 keeps it beside an empty tensor, 4-bit weights two to a byte."""
    packed = getattr(parameter, "quant_state", None)
    return int(getattr(parameter, "ds_numel", parameter.numel())) if packed is None else packed.shape.numel()


def own_share(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Returns where this rank's part of a sharded weight begins in the flattened weight, and that part unpadded."""
    share: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    start = distributed.rank() * share.numel()
    return start, share.reshape(-1)[: max(0, num_elements(parameter) - start)]


def gathered_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns all weights and buffers on the CPU of rank 0, {} elsewhere; every rank must call it.

    Weights that share storage still do in the result.
    """
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        if id(value) not in copies:
            sharded = [value] if isinstance(value, nn.Parameter) and is_sharded(value) else []
            with GatheredParameters(sharded):
                copies[id(value)] = value.detach().to("cpu", copy=True) if distributed.is_main() else value
        if distributed.is_main():
            state[key] = copies[id(value)]
    return state
