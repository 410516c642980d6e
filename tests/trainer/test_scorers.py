"""Builders of models with a scalar head: what a language model becomes, its head's start, and frozen random heads."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from trainer import check_builds, models, scorers
from trainer.config import ConfigError
from trainer.scorers import find_adapter_problem, find_frozen_head, find_head_problem, sequence_scorer, token_scorer
from trainer.seeds import seed_everything

KEY = "models.reward.build"
SETTINGS = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_dropout": 0.1,
    "eos_token_id": [7, 8],
    "pad_token_id": None,
}
CONFIG = LlamaConfig(**{key: value for key, value in SETTINGS.items() if key != "model_type"})


def node(name: Any, kind: str = "sequence_scorer") -> dict[str, Any]:
    return {"_target_": f"trainer.scorers.{kind}", "name": str(name)}


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


@pytest.mark.parametrize(
    ("build", "kind", "start"),
    [
        (sequence_scorer, LlamaForSequenceClassification, "at random"),
        (token_scorer, LlamaForTokenClassification, "at 0"),
    ],
)
def test_a_language_model_keeps_its_trunk_and_gets_one_label_and_no_dropout(
    language_model: Path,
    build: Any,
    kind: type,
    start: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.INFO):
        model = build(str(language_model), dtype=torch.bfloat16)

    assert type(model) is kind and model.config.num_labels == model.score.out_features == 1
    assert (model.config.attention_dropout, model.config.classifier_dropout) == (0.0, 0.0)
    assert all(part.p == 0 for part in model.modules() if isinstance(part, torch.nn.Dropout))
    assert model.config.pad_token_id == 7, "or transformers refuses a batch"
    saved = load_file(language_model / "model.safetensors")
    for name, value in model.model.named_parameters():
        assert torch.equal(value, saved[f"model.{name}"].bfloat16())
    (message,) = caplog.messages
    assert f"is not in the files: the scalar head starts {start}" in message
    assert bool(model.score.weight.any()) is (start == "at random")
    assert capfd.readouterr() == ("", ""), "transformers' own report is long"


def test_the_head_follows_from_the_seed_and_not_from_what_was_drawn_since(language_model: Path) -> None:
    heads = []
    for seed, num_drawn in ((5, 0), (5, 3), (6, 0)):
        seed_everything(seed, "reward")
        torch.rand(num_drawn)
        heads.append(sequence_scorer(str(language_model), dtype=torch.float32).score.weight.detach())

    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert float(heads[0].std()) == pytest.approx(1 / math.sqrt(33), rel=0.5)


def test_a_critic_takes_the_head_of_a_reward_model(
    language_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = sequence_scorer(str(language_model), dtype=torch.float32)
    reward.save_pretrained(tmp_path / "reward")
    caplog.clear()

    with caplog.at_level(logging.INFO):
        critic = token_scorer(str(tmp_path / "reward"), dtype=torch.float32)
        again = sequence_scorer(str(tmp_path / "reward"), dtype=torch.float32)

    assert torch.equal(critic.score.weight, reward.score.weight) and critic.score.bias.tolist() == [0.0]
    assert torch.equal(again.score.weight, reward.score.weight)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (scorers.sequence_scorer_from_config, LlamaForSequenceClassification),
        (scorers.token_scorer_from_config, LlamaForTokenClassification),
    ],
)
def test_a_mapping_gives_a_model_with_a_head_of_the_seed(build: Any, kind: type) -> None:
    seed_everything(0, "reward")
    model = build(SETTINGS, dtype=torch.float32)
    seed_everything(0, "reward")
    expected = build(SETTINGS, dtype=torch.float32)

    assert type(model) is kind and model.config.num_labels == 1 and model.config.attention_dropout == 0.0
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_head_of_several_labels_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**CONFIG.to_dict() | {"num_labels": 3})).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="its head gives 3 labels; a scalar head, of one, is needed"):
        sequence_scorer(str(tmp_path), dtype=torch.float32)


def test_an_encoder_gets_a_head_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForSequenceClassification(config).bert.save_pretrained(tmp_path)

    model = sequence_scorer(str(tmp_path), dtype=torch.float32)

    assert type(model) is BertForSequenceClassification and model.classifier.out_features == 1
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.0
    assert model.classifier.bias.tolist() == [0.0]


def test_gradient_checkpointing_is_switched_on(language_model: Path) -> None:
    model = sequence_scorer(str(language_model), dtype=torch.float32, gradient_checkpointing=True)

    assert model.model.gradient_checkpointing and model.config.use_cache is False


def test_a_frozen_model_whose_files_hold_no_head_is_named_before_anything_is_built(
    language_model: Path, tmp_path: Path
) -> None:
    trained = tmp_path / "trained"
    sequence_scorer(str(language_model), dtype=torch.float32).save_pretrained(trained)

    for name in (language_model, "embedded:smollm2-135m-instruct", "some.gguf"):
        for kind in ("sequence_scorer", "token_scorer"):
            (problem,) = find_head_problem(KEY, node(name, kind))
            assert problem.startswith(f"{KEY}.name={name}: its files hold no scalar head (")
    assert "(LlamaForCausalLM)" in find_head_problem(KEY, node(language_model))[0]
    assert find_head_problem(KEY, node(trained)) == []
    assert find_head_problem(KEY, {**node(language_model), "_target_": "trainer.models.causal_lm"}) == []


@pytest.mark.parametrize("kind", ["sequence_scorer", "token_scorer"])
def test_nodes_are_checked_as_those_of_language_models(tmp_path: Path, kind: str, language_model: Path) -> None:
    (missing,) = check_builds.check_build(KEY, node(tmp_path / "nowhere", kind))
    (unknown,) = check_builds.check_build(
        KEY, {"_target_": f"trainer.scorers.{kind}_from_config", "config": {"model_type": "lama"}}
    )

    assert "this folder does not exist" in missing and "nearest: llama" in unknown
    assert check_builds.check_build(KEY, node(language_model, kind)) == []
    assert models.tokenizer_name(node(language_model, kind)) is None, "the folder holds no tokenizer"
    empty = models.empty_model(node(language_model, kind))
    assert empty is not None and "score.weight" in dict(empty.named_parameters())


def test_adapters_train_a_fresh_head_or_are_refused(language_model: Path, tmp_path: Path) -> None:
    sequence_scorer(str(language_model), dtype=torch.float32).save_pretrained(tmp_path / "trained")

    (problem,) = find_adapter_problem("models.reward", node(language_model), {"r": 4})

    assert "also the scalar head" in problem and "add score to models.reward.lora.modules_to_save" in problem
    assert find_adapter_problem("models.reward", node(language_model), {"modules_to_save": ["embed_tokens"]}) == [
        problem
    ]
    for settings in ({"modules_to_save": ["score"]}, {"target_modules": ["q_proj", "score"]}):
        assert find_adapter_problem("models.reward", node(language_model), settings) == []
    assert find_adapter_problem("models.reward", node(tmp_path / "trained"), {"r": 4}) == []


@pytest.mark.parametrize("kind", ["sequence_scorer", "token_scorer"])
def test_a_head_that_is_not_in_the_files_may_not_be_frozen(language_model: Path, tmp_path: Path, kind: str) -> None:
    sequence_scorer(str(language_model), dtype=torch.float32).save_pretrained(tmp_path / "trained")

    (problem,) = find_frozen_head("models.critic", node(language_model, kind), ["model.norm.*", "sco*"])

    assert problem.startswith("models.critic.freeze=['sco*'] freezes the scalar head, which is not in the files")
    assert find_frozen_head("models.critic", node(language_model, kind), ["model.*"]) == []
    assert find_frozen_head("models.critic", node(tmp_path / "trained", kind), ["score.*"]) == []
    assert find_frozen_head("models.critic", node("some.gguf", kind), ["score.weight"]) != []
