from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from tasks.logits.taps import captured, find_module, tapped_forward
from tests.tasks.logits.test_heads import SMALL, handle
from trainer import ConfigError, ModelHandle

TOKENS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def llama() -> ModelHandle:
    torch.manual_seed(0)
    return handle(LlamaForCausalLM(LlamaConfig(**SMALL)).double())


def weight_gradients(model: ModelHandle) -> dict[str, Tensor]:
    found = {name: weight.grad for name, weight in model.module.named_parameters() if weight.grad is not None}
    model.module.zero_grad()
    return found


def test_states_of_an_encoder_are_its_hidden_states() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = handle(BertModel(config).eval())
    right = model.module(input_ids=TOKENS, output_hidden_states=True)

    output, states = tapped_forward(model, {"input_ids": TOKENS}, ["encoder.layer.0", "encoder.layer.-1", "embeddings"])

    torch.testing.assert_close(output.last_hidden_state, right.last_hidden_state)
    torch.testing.assert_close(states["embeddings"], right.hidden_states[0])
    torch.testing.assert_close(states["encoder.layer.0"], right.hidden_states[1])
    torch.testing.assert_close(states["encoder.layer.-1"], right.hidden_states[2])


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_loss_of_inner_states_trains_what_is_before_them(is_checkpointed: bool) -> None:
    model = llama()
    layers = model.module.model.layers
    embedded = model.module.model.embed_tokens(TOKENS)
    states: dict[str, Tensor] = {}
    layers[0].self_attn.q_proj.register_forward_hook(lambda module, inputs, output: states.update(q=output))
    hidden = model.module(inputs_embeds=embedded, output_hidden_states=True).hidden_states[1]
    (hidden.square().sum() + states["q"].pow(3).sum()).backward()  # type: ignore[no-untyped-call]
    expected = weight_gradients(model)
    if is_checkpointed:
        model.module.gradient_checkpointing_enable({"use_reentrant": False})
        model.module.train()

    _, found = tapped_forward(model, {"input_ids": TOKENS}, ["model.layers.0", "model.layers.-2.self_attn.q_proj"])
    loss = found["model.layers.0"].square().sum() + found["model.layers.-2.self_attn.q_proj"].pow(3).sum()
    loss.backward()  # type: ignore[no-untyped-call]

    gradients = weight_gradients(model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_reentrant_checkpointing_is_refused() -> None:
    model = llama()
    model.module.gradient_checkpointing_enable({"use_reentrant": True})
    model.module.enable_input_require_grads()
    model.module.train()

    with pytest.raises(ValueError, match="use_reentrant=False"):
        tapped_forward(model, {"input_ids": TOKENS}, ["model.layers.0.mlp"])


def test_the_trainer_hears_a_gradient_through_inner_states_alone() -> None:
    model = llama()
    heard: list[str] = []
    model.on_gradient = heard.append

    _, states = tapped_forward(model, {"input_ids": TOKENS}, ["model.layers.0"])
    states["model.layers.0"].sum().backward()  # type: ignore[no-untyped-call]

    assert heard == ["student"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("model.layer.0", "did you mean model.layers.0"),
        ("model.layers.2", "did you mean model.layers"),
        ("model.layers.-3", "did you mean model.layers"),
        ("lm_head.-1", "did you mean lm_head?"),
        ("transformer", "it has model, lm_head"),
    ],
)
def test_a_wrong_path_is_refused_with_the_nearest(path: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_module(llama(), path)

    assert f"models.student has no module '{path}'" in str(caught.value)
    assert hint in str(caught.value)


def test_a_module_without_a_tensor_is_refused_and_no_hook_stays() -> None:
    class Nothing(nn.Module):
        def forward(self, value: Tensor) -> str:
            return "nothing"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, value: Tensor) -> Any:
            self.nothing(value)
            return value

    model = handle(Model())

    with pytest.raises(TypeError, match="nothing returns str"), captured(model, ["nothing"]):
        model(torch.zeros(1))

    assert not model.module.nothing._forward_hooks
