from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
)

from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head, HeadTap
from tasks.text.language import completion_mask, counted_logits, next_tokens
from trainer import IGNORED, Batch, ConfigError, ModelHandle, UpdatePlan

VOCABULARY = 37
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Each with the scale and the cap that its formula has.
FAMILIES: dict[str, tuple[PreTrainedConfig, float, float | None]] = {
    "llama": (LlamaConfig(**SMALL), 1.0, None),
    "qwen2": (Qwen2Config(**SMALL, tie_word_embeddings=True), 1.0, None),
    "gpt2": (GPT2Config(**SMALL, attn_pdrop=0.0), 1.0, None),
    "gemma2": (Gemma2Config(**SMALL, final_logit_softcapping=1.5), 1.0, 1.5),
    "cohere": (CohereConfig(**SMALL, logit_scale=0.0625), 0.0625, None),
    "granite": (GraniteConfig(**SMALL, logits_scaling=8.0), 0.125, None),
}


def handle(module: nn.Module, *, name: str = "student", trainable: bool = True) -> ModelHandle:
    """Returns a model as the trainer holds one that is replicated."""
    return ModelHandle(
        name,
        engine=module,
        module=module,
        trainable=trainable,
        config=None,
        accumulation=1,
        plan=UpdatePlan(),
        optimizer=None,
        scheduler=None,
        schedule="",
        select=lambda name: nullcontext(),
    )


def build(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> ModelHandle:
    torch.manual_seed(0)
    return handle(AutoModelForCausalLM.from_config(config).to(dtype).eval())


def make_batch() -> Batch:
    """Three examples of one padded; the columns at both ends have no label."""
    tokens = torch.randint(3, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(tokens)
    attended[1, 6:] = 0
    labels = tokens.masked_fill(attended == 0, IGNORED)
    labels[:, :3], labels[:, -1] = IGNORED, IGNORED
    return {"input_ids": tokens, "attention_mask": attended, "labels": labels}


def gradients(model: ModelHandle) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_all_gradients_of_a_family_are_those_of_its_own_logits(family: str) -> None:
    config, scale, softcap = FAMILIES[family]
    model, batch = build(config, dtype=torch.float64), make_batch()
    counted = completion_mask(batch)
    labels = next_tokens(batch, counted)
    logits = model.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    value = F.cross_entropy(logits[:, :-1][counted], labels, reduction="sum")
    value.backward()
    expected = gradients(model)
    model.module.zero_grad()

    tap = HeadTap.of(model)
    assert isinstance(tap, HeadTap)
    assert tap.verify(batch, counted) is None
    assert (tap.scale, tap.softcap) == (scale, softcap)

    objective = tap.run(batch, counted, entropy_of(labels))["head"]
    objective.backward()

    torch.testing.assert_close(objective, value, rtol=1e-9, atol=0)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-8, msg=name)


def entropy_of(labels: Tensor) -> Callable[[Tensor, Head], Tensor]:
    """Returns what computes the cross-entropy in the place of a head, in tiles of four rows."""

    def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(logits, labels[rows], reduction="sum"), logits.new_zeros(1)

    return lambda hidden, head: fused_loss(hidden, head, loss, tile_rows=4)[0]


def tapped(model: ModelHandle, *, vocabulary: int | None = None) -> HeadTap:
    tap = HeadTap.of(model, vocabulary=vocabulary)
    assert isinstance(tap, HeadTap), tap
    assert tap.verify(make_batch(), completion_mask(make_batch())) is None
    return tap


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_key_that_a_family_does_not_use_is_not_believed(key: str) -> None:
    config = LlamaConfig(**SMALL)
    setattr(config, key, 3.0)

    tap = tapped(build(config))

    assert (tap.scale, tap.softcap) == (1.0, None)


def test_one_key_may_mean_to_divide_or_to_multiply() -> None:
    tap = tapped(build(HyperCLOVAXConfig(**SMALL, logits_scaling=0.3)))

    assert (tap.scale, tap.softcap) == (0.3, None)


class Odd(LlamaForCausalLM):
    """A model that adds something to its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.1 * output.logits.square()
        return output


class Stubborn(LlamaForCausalLM):
    """A model that does not run on an empty batch of logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        assert len(output.logits[0])
        return output


class Twice(LlamaForCausalLM):
    """A model that runs its head twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.lm_head(torch.zeros(1, 1, 16))
        return output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Odd, "does something unknown to its logits"),
        (Stubborn, "does not run without its logits: IndexError"),
        (Twice, "the head runs several times"),
    ],
)
def test_an_unknown_family_is_found_out(kind: type[LlamaForCausalLM], reason: str) -> None:
    torch.manual_seed(0)
    model, batch = handle(kind(LlamaConfig(**SMALL))), make_batch()
    tap = HeadTap.of(model)
    assert isinstance(tap, HeadTap)

    found = tap.verify(batch, completion_mask(batch))

    assert reason in str(found)
    assert not model.module.lm_head._forward_hooks
    assert not model.module._forward_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_verified_within_its_rounding_and_a_wrong_scale_is_not(dtype: torch.dtype) -> None:
    batch = make_batch()
    tapped(build(FAMILIES["gemma2"][0], dtype=dtype))
    tap = tapped(build(FAMILIES["granite"][0], dtype=dtype))

    tap.readings = [(0.13, None)]

    assert "unknown" in str(tap.verify(batch, completion_mask(batch)))


def test_verify_leaves_the_mode_alone_and_needs_no_position_that_counts() -> None:
    model, batch = build(LlamaConfig(**SMALL, attention_dropout=0.5)), make_batch()
    model.module.train()
    tap = HeadTap.of(model)
    assert isinstance(tap, HeadTap)

    assert tap.verify(batch, torch.zeros_like(completion_mask(batch))) is None
    assert model.module.training


def test_what_is_no_plain_head_is_said() -> None:
    adapted: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    adapted = get_peft_model(adapted, LoraConfig(r=2, target_modules=["lm_head"]))

    assert "the head of models.student is Linear, not a plain nn.Linear" in str(HeadTap.of(handle(adapted)))
    assert "no model of transformers" in str(HeadTap.of(handle(nn.Linear(2, 2))))
    encoder: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).model
    assert "is NoneType" in str(HeadTap.of(handle(encoder)))


def test_a_lora_student_gets_the_gradients_of_its_adapters_alone() -> None:
    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).double()
    model = handle(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).double())
    batch = make_batch()
    counted = completion_mask(batch)
    labels = next_tokens(batch, counted)
    logits = model.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    F.cross_entropy(logits[counted], labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    model.module.zero_grad()

    output = tapped(model).run(batch, counted, entropy_of(labels), ["model.layers.0"])
    output["head"].backward()

    assert output["hidden"]["model.layers.0"].shape == (3, 8, 16)
    assert all("lora" in name for name in expected)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.pop(name), rtol=1e-6, atol=1e-8)
    assert not expected


def test_a_frozen_teacher_gives_states_and_head_of_another_width_without_a_graph() -> None:
    model, batch = build(LlamaConfig(**{**SMALL, "hidden_size": 32, "head_dim": 8})), make_batch()
    model.trainable = False
    counted = completion_mask(batch)
    tap = tapped(model, vocabulary=30)
    own = counted_logits(model, batch, counted, vocabulary=30)

    hidden, head, states = tap.read(batch, counted, ["model.layers.-1"])

    torch.testing.assert_close(head.logits(hidden), own)
    assert own.shape == (int(counted.sum()), 30)
    assert not hidden.requires_grad
    assert not head.weight.requires_grad
    assert not states["model.layers.-1"].requires_grad


def test_hooks_are_gone_after_an_error_and_the_model_is_as_before() -> None:
    model, batch = build(LlamaConfig(**SMALL)), make_batch()
    counted, tap = completion_mask(batch), tapped(model)
    before = counted_logits(model, batch, counted)

    def fail(hidden: Tensor, head: Head) -> Tensor:
        raise ArithmeticError("of the loss")

    with pytest.raises(ArithmeticError, match="of the loss"):
        tap.run(batch, counted, fail, ["model.norm"])

    torch.testing.assert_close(counted_logits(model, batch, counted), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


def test_the_head_is_no_inner_state() -> None:
    model, batch = build(LlamaConfig(**SMALL)), make_batch()

    with pytest.raises(ConfigError, match="the head gives no inner states"):
        tapped(model).run(batch, completion_mask(batch), lambda hidden, head: hidden, ["lm_head"])


def test_the_head_runs_at_the_columns_that_count_only() -> None:
    model, batch = build(LlamaConfig(**SMALL)), make_batch()
    shapes: list[tuple[int, ...]] = []
    tap = tapped(model)
    model.module.lm_head.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))

    tap.read(batch, completion_mask(batch))

    assert shapes == [(3, 4, 16)]
