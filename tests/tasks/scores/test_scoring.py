"""Scores of heads without engines: encoders, the pad token, and what is refused; on engines: test_reward.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from tasks.scores.scoring import last_tokens, sequence_scores, token_scores
from tests.tasks.reward_runs import ROWS, padded
from tests.tasks.task_runs import PAD, llama
from trainer import ConfigError


class Handle:
    """What the task sees of a model, without an engine."""

    name, trainable, has_ended = "reward", False, False

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()

    def __call__(self, **inputs: Any) -> Any:
        with torch.no_grad():
            return self.module(**inputs)


def handle(module: nn.Module) -> Any:
    return Handle(module)


def llama_scorer(**options: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = llama("small").config
    config.num_labels = 1
    for name, value in options.items():
        setattr(config, name, value)
    return LlamaForSequenceClassification(config)


def gpt2_scorer() -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=61, pad_token_id=60, num_labels=1)
    return GPT2ForSequenceClassification(config)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [lambda: llama_scorer(pad_token_id=60), gpt2_scorer], ids=["llama", "gpt2"])
def test_where_the_pad_token_stands_in_no_text_the_score_is_transformers_own(make: Any, side: str) -> None:
    module, batch = make().eval(), padded(side)
    batch["input_ids"][batch["attention_mask"] == 0] = 60
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)  # for GPT-2, whose positions are absolute

    with torch.no_grad():
        expected = module(**batch, position_ids=positions).logits[:, 0]

    torch.testing.assert_close(sequence_scores(handle(module), batch), expected)


def test_where_the_end_token_pads_the_end_is_scored_and_transformers_takes_the_token_before() -> None:
    module, batch = llama_scorer().eval(), padded("right")
    row = ROWS.index([7, 3, PAD])

    with torch.no_grad():
        pooled = module(**batch).logits[row, 0]
        before = sequence_scores(handle(module), {"input_ids": torch.tensor([[7, 3]])})[0]
        whole = module.score(module.model(input_ids=torch.tensor([ROWS[row]])).last_hidden_state)[0, -1, 0]

    torch.testing.assert_close(sequence_scores(handle(module), batch)[row], whole)
    torch.testing.assert_close(pooled, before)
    assert (pooled - whole).abs() > 1e-3


def test_an_encoder_scores_the_text_as_a_whole() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    module, batch = BertForSequenceClassification(config).eval(), padded("right")

    with torch.no_grad():
        expected = module(**batch).logits[:, 0]

    torch.testing.assert_close(sequence_scores(handle(module), batch), expected)


def test_scores_are_float32_of_a_model_in_any_type() -> None:
    assert sequence_scores(handle(llama_scorer().bfloat16()), padded("right")).dtype == torch.float32


def test_a_model_of_other_outputs_is_refused_with_the_build_that_fits() -> None:
    torch.manual_seed(0)
    two = LlamaForTokenClassification(llama("small").config)  # two labels

    with pytest.raises(ConfigError, match=r"one score per token is needed: model@models\.reward\.build=critic"):
        token_scores(handle(two), padded("right"))
    with pytest.raises(ConfigError, match="one score per token is needed"):
        token_scores(handle(llama_scorer()), padded("right"))
    with pytest.raises(ConfigError, match=r"one score per text is needed: model@models\.reward\.build=reward_model"):
        sequence_scores(handle(llama("small")), padded("right"))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], [1, 3, 3, 0]), (None, [3, 3, 3, 3])],
)
def test_the_last_token_is_found_by_the_mask(mask: Any, expected: list[int]) -> None:
    batch: dict[str, Tensor] = {"input_ids": torch.zeros(4, 4, dtype=torch.long)}
    if mask is not None:
        batch["attention_mask"] = torch.tensor(mask)

    assert last_tokens(batch).tolist() == expected
