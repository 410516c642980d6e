"""The head of a causal language model: how hidden states become logits, and how both are had without all logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tasks.logits.taps import base_model, captured, find_module, replaced_output
from tasks.text.language import counted_logits, model_arguments, select_rows
from trainer import Batch, ConfigError, ModelHandle, gather_with_gradient

# What families do to the logits after the head: key of the configuration to how it is read. Scaling before the head
# (MiniCPM, Inkling) is part of the hidden states. A key may mean nothing to a model, or something else:
# `HeadTap.verify` tries the others.
_SCALES: dict[str, Callable[[float], tuple[float, ...]]] = {
    "logit_scale": lambda value: (value,),  # Cohere
    "logits_scaling": lambda value: (1 / value, value),  # Granite divides, HyperCLOVA X multiplies
    "lm_head_multiplier": lambda value: (value,),  # Falcon-H1
    "output_multiplier": lambda value: (value,),  # Muse
}
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
PROBED = 16  # positions at which a head is compared with its model

Compute = Callable[[Tensor, "Head"], Any]  # (hidden states (N, H), the head, whole) -> the head's output


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns float32, or float64 of float64: what losses and sums are computed in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(kw_only=True, frozen=True)
class Head:
    """What turns hidden states into logits: cap(scale * (x W^T + b)), where cap(z) = c tanh(z / c).

    Args:
        weight: (V, H), whole on this rank.
        bias: (V,) or None.
        scale: Multiplies the logits.
        softcap: The c of the cap, None: no cap.
        vocabulary: The first so many logits count, None: all.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocabulary: int | None = None

    @property
    def num_logits(self) -> int:
        """How many logits it gives."""
        return len(self.weight) if self.vocabulary is None else min(self.vocabulary, len(self.weight))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of hidden states (N, H), (N, V), in float32 (float64 of a float64 head).

        The product is the model's own, in its data type; scale and cap follow in float32.
        """
        bias = None if self.bias is None else self.bias[: self.vocabulary]
        raw = F.linear(hidden, self.weight[: self.vocabulary], bias)
        logits = raw.to(wide(raw.dtype))
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def gradient_of_product(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Returns the gradient of x W^T + b, in the place of the gradient of the logits that came of it."""
        if self.softcap is not None:
            gradient = gradient.mul_((logits / self.softcap).square_().neg_().add_(1))  # tanh' = 1 - tanh²
        return gradient if self.scale == 1 else gradient.mul_(self.scale)

    def detached(self) -> Head:
        """Returns the same head without a graph."""
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    def to(self, dtype: torch.dtype) -> Head:
        """Returns the same head in a data type."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))


class HeadTap:
    """Runs a computation in the place of a model's head, within the model's own forward.

    There the head's weight is whole under every ZeRO stage, gathered once, and what comes out is the model's output
    to all hooks of DeepSpeed and of the trainer.

    Args:
        linear: The model's head.
        readings: What scale and cap may be, the likeliest first.
        vocabulary: The first so many logits count, None: all.
    """

    def __init__(
        self,
        model: ModelHandle,
        linear: nn.Linear,
        *,
        readings: Sequence[tuple[float, float | None]],
        vocabulary: int | None,
    ) -> None:
        self.model, self.linear, self.readings, self.vocabulary = model, linear, readings, vocabulary
        self.scale, self.softcap = readings[0]

    @classmethod
    def of(cls, model: ModelHandle, *, vocabulary: int | None = None) -> HeadTap | str:
        """Returns the tap of a model, which `verify` must try out; or in words why its head cannot be tapped."""
        module = base_model(model.module)
        if not isinstance(module, PreTrainedModel):
            return f"models.{model.name} is a {type(module).__name__}, no model of transformers"
        linear = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        if type(linear) is not nn.Linear:  # a subclass, or an adapter on it, computes something else
            return f"the head of models.{model.name} is {type(linear).__name__}, not a plain nn.Linear"
        return cls(model, linear, readings=_readings(module.config), vocabulary=vocabulary)

    def of_copy(self, model: ModelHandle) -> HeadTap:
        """Returns the same of another copy of the model."""
        tap = HeadTap.of(model, vocabulary=self.vocabulary)
        assert isinstance(tap, HeadTap), tap  # the first one's head is read
        tap.scale, tap.softcap = self.scale, self.softcap
        return tap

    def run(self, batch: Batch, counted: Tensor, compute: Compute, paths: Sequence[str] = ()) -> dict[str, Any]:
        """Runs the model, and `compute` in the place of its head.

        Args:
            counted: Positions that count, (B, T-1); position t holds the hidden state after token t.
            compute: Gets their hidden states, (N, H), and the head. Its result may be a tensor or a tuple of them. The
                head's weight is to be used there, or as `Head.detached`, which stays whole as long as it is held.
            paths: Of modules whose outputs are wanted too, as in `find_module`.

        Returns:
            "head": what came of `compute`; "hidden": path to the module's output.
        """
        if any(find_module(self.model, path) is self.linear for path in paths):
            raise ConfigError(f"models.{self.model.name}: the head gives no inner states; name another module")
        output: dict[str, Any] = {}
        with ExitStack() as stack:
            output["hidden"] = stack.enter_context(captured(self.model, paths))
            stack.enter_context(self._hooked(counted, compute, output))
            stack.enter_context(replaced_output(self.model.module, lambda _: output))
            found: dict[str, Any] = self.model(**model_arguments(self.model, batch, counted))
        return found

    def read(self, batch: Batch, counted: Tensor, paths: Sequence[str] = ()) -> tuple[Tensor, Head, dict[str, Tensor]]:
        """Returns the hidden states, (N, H), the head, and the inner states by path, all of one forward.

        The head holds the weight that was gathered in the forward, so that a sharded one is gathered once: let go of
        it at the end of the micro-batch.
        """
        heads: list[Head] = []

        def keep(hidden: Tensor, head: Head) -> Tensor:
            heads.append(head.detached())
            return hidden

        output = self.run(batch, counted, keep, paths)
        return output["head"], heads[0], output["hidden"]

    def verify(self, batch: Batch, counted: Tensor) -> str | None:
        """Compares the head with the model's own logits; returns in words why it cannot be used, None if it can.

        Of the readings it takes the first that fits. Every rank must call it, and all come to the same answer.

        Args:
            counted: Positions, (B, T-1), of which the first few are compared.
        """
        counted = counted & (counted.flatten().cumsum(0).view_as(counted) <= PROBED)
        if not counted.any():
            counted = torch.zeros_like(counted)
            counted[0, 0] = True
        try:
            with self.model.evaluating(), torch.no_grad():
                own = counted_logits(self.model, batch, counted, vocabulary=self.vocabulary)
                errors = self.run(batch, counted, lambda hidden, head: self._errors(hidden, head, own))["head"]
        except Exception as error:
            return f"models.{self.model.name} does not run without its logits: {type(error).__name__}: {error}"
        worst = gather_with_gradient(errors.unsqueeze(0))[0].amax(0).tolist()
        tolerance = max(1e-5, 2 * torch.finfo(self.model.dtype).eps)
        for reading, distance in zip(self.readings, worst, strict=True):
            if distance <= tolerance:
                self.scale, self.softcap = reading
                return None
        return (
            f"models.{self.model.name} does something unknown to its logits after the head: "
            f"they differ by {min(worst):.1%} from what its configuration says"
        )

    def _errors(self, hidden: Tensor, head: Head, own: Tensor) -> Tensor:
        """Returns how far each reading is from the model's logits, relative to their size, (readings,)."""
        errors = []
        for scale, softcap in self.readings:
            logits = replace(head, scale=scale, softcap=softcap).logits(hidden)
            difference = (logits - own).masked_fill(logits.isnan() & own.isnan(), 0)  # some models' padding is NaN
            errors.append(difference.norm() / own.nan_to_num().norm())
        return torch.stack(errors).nan_to_num(nan=math.inf)

    def _head(self) -> Head:
        return Head(
            weight=self.linear.weight,
            bias=self.linear.bias,
            scale=self.scale,
            softcap=self.softcap,
            vocabulary=self.vocabulary,
        )

    @contextmanager
    def _hooked(self, counted: Tensor, compute: Compute, output: dict[str, Any]) -> Iterator[None]:
        """Within it, the head runs `compute` and puts the result into `output`; the model goes on with no logits."""
        given: list[Tensor] = []
        left: list[Tensor] = []

        def take_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            if given:
                raise ValueError("the head runs several times in one forward")
            given.append(inputs[0])
            return (inputs[0][:0],)  # an empty batch, which every family can scale, cap or slice

        def run(module: nn.Module, inputs: Any, logits: Tensor) -> Any:
            left.append(logits.detach())
            return compute(select_rows(given[0], counted), self._head())

        def hand_over(module: nn.Module, inputs: Any, result: Any) -> Tensor:
            output["head"] = result
            return left.pop()

        # DeepSpeed's hooks stay between: they gather the weight and note the input before, they note the result and let
        # the weight go after.
        hooks = [
            self.linear.register_forward_pre_hook(take_input),
            self.linear.register_forward_hook(run, prepend=True),
            self.linear.register_forward_hook(hand_over),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _readings(config: PreTrainedConfig) -> list[tuple[float, float | None]]:
    """Returns what scale and cap a configuration may mean, the likeliest first."""
    values: dict[str, Any] = config.get_text_config().to_dict()
    known = {key: float(value) for key, value in values.items() if isinstance(value, int | float) and value > 0}
    scales = [scale for key, read in _SCALES.items() if key in known for scale in read(known[key])]
    caps = [known[key] for key in _CAPS if key in known]
    return list(dict.fromkeys(itertools.product([*scales, 1.0], [*caps, None])))


@dataclass(kw_only=True, frozen=True)
class HeadTaps:
    """The taps of several models, looked up by the model that is called.

    Under the same name another copy may be called later, such as an export that is loaded again; a tap that is kept by
    name would go on asking the first one, and compare it with itself.
    """

    taps: Mapping[str, HeadTap] = field(default_factory=dict)

    def get(self, model: ModelHandle) -> HeadTap | None:
        """Returns the tap of this very model; None: all its logits are built at once."""
        tap = self.taps.get(model.name)
        return tap if tap is None or tap.model is model else tap.of_copy(model)


def tap_heads(
    models: Sequence[ModelHandle], *, vocabulary: int | None, device: torch.device
) -> tuple[HeadTaps, list[str]]:
    """Returns the taps of all models, each tried out; or none, and why not.

    Every rank must call it.
    """
    sample, counted = sample_batch(device)
    taps: dict[str, HeadTap] = {}
    problems = []
    for model in models:
        tap = HeadTap.of(model, vocabulary=vocabulary)
        problem = tap if isinstance(tap, str) else tap.verify(sample, counted)
        if problem is not None:
            problems.append(problem)
        elif isinstance(tap, HeadTap):
            taps[model.name] = tap
    return HeadTaps(taps={} if problems else taps), problems


def sample_batch(device: torch.device) -> tuple[Batch, Tensor]:
    """Returns a batch of a few tokens to try models on, and which of its positions count."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    return {"input_ids": tokens, "labels": tokens}, torch.ones_like(tokens[:, 1:], dtype=torch.bool)
