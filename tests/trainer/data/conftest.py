"""A tiny tokenizer and tiny models, made here: no hub, no download."""

import json
from collections.abc import Callable
from importlib.resources import files

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def _make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    text = files("trainer").joinpath("embedded", "chatterbot_english.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [row["completion"] for row in rows],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|start|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Pads with its end token, as many do, and has a chat template."""
    return _make_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return _make_tokenizer(None)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[str], PreTrainedTokenizerFast]:
    """Returns a function from a chat template to a tokenizer."""
    return _make_tokenizer


def make_model(kind: str, attention: str) -> nn.Module:
    """Returns a tiny model whose logits are large enough that a leak between documents shows."""
    sizes = {"vocab_size": 400, "bos_token_id": 0, "eos_token_id": 1}
    config = {
        "llama": LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        ),
        "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **sizes),
    }[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    assert model.config._attn_implementation == attention
    return model


@pytest.fixture(scope="session", params=["llama-sdpa", "llama-eager", "gpt2-sdpa", "gpt2-eager"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    kind, attention = request.param.split("-")
    return make_model(kind, attention)
