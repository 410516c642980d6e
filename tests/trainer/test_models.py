"""Builders of models: every kind of source, checks before anything is allocated, freezing by pattern."""

import logging
import subprocess
import warnings
from typing import NotRequired, TypedDict, Unpack

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from tests.trainer.test_assets import tiny_llama, write_gguf
from trainer import assets, models
from trainer.check_builds import check_build
from trainer.config import ConfigError
from trainer.freezing import freeze
from trainer.targets import target_problems

KEY = "models.student.build"
TOKENS = torch.tensor([[3, 50, 7, 1, 200]])

pytestmark = pytest.mark.usefixtures("cache")


def pretrained(name, **fields):
    return {"_target_": "trainer.models.causal_lm", "name": str(name), **fields}


def from_config(config):
    return {"_target_": "trainer.models.causal_lm_from_config", "config": config}


def test_folder_gives_the_saved_model_in_the_wanted_type(folder):
    model = models.causal_lm(str(folder), dtype=torch.float32)

    torch.testing.assert_close(model(TOKENS).logits, tiny_llama()(TOKENS).logits)
    assert models.causal_lm(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


BUILDERS = ("models.causal_lm", "scorers.sequence_scorer", "scorers.token_scorer", "encoders.encoder")


@pytest.mark.parametrize("target", [f"trainer.{name}{kind}" for name in BUILDERS for kind in ("", "_from_config")])
def test_keys_that_all_builds_share_are_checked_by_name_and_type(target):
    source = {"config": {}} if target.endswith("_from_config") else {"name": "x"}

    def problems(**keys):
        return target_problems({"models": {"student": {"build": {"_target_": target, **source, **keys}}}})

    assert problems() == problems(attn_implementation="eager", gradient_checkpointing=True) == []
    (unknown,) = problems(gradient_checkpoint=True)
    assert unknown.startswith(f"{KEY}.gradient_checkpoint: {target} has no such parameter")
    assert "gradient_checkpointing" in unknown
    assert problems(gradient_checkpointing="yes") == [f"{KEY}.gradient_checkpointing=yes: must be true or false"]
    reads_own_code = "name" in source and target != "trainer.encoders.encoder"
    assert bool(problems(trust_remote_code=True)) is not reads_own_code


class _Listed(TypedDict):
    width: int
    depth: NotRequired[int]


def of_listed_keywords(**keys: Unpack[_Listed]) -> nn.Module:
    raise NotImplementedError


def test_a_users_listed_keywords_are_known_and_those_required_are_missed():
    def problems(**keys):
        return target_problems({"task": {"_target_": f"{__name__}.of_listed_keywords", **keys}})

    assert problems(width=2) == problems(width=2, depth=3) == []
    (missing,) = problems(depth=3)
    assert missing.startswith("task.width is missing")
    assert problems(width=2.5) == ["task.width=2.5: must be a whole number"]


def test_loading_prints_and_warns_nothing(folder, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.causal_lm(str(folder), dtype=torch.float32)

    assert capfd.readouterr() == ("", "")


def test_weights_that_the_checkpoint_lacks_are_told(folder, caplog):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    models.causal_lm(str(folder), dtype=torch.float32)

    assert "model.layers.1.mlp.up_proj.weight are not in the checkpoint and start at random" in caplog.text


def test_gguf_is_converted_once_to_the_same_numbers(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", with_tokenizer=False)
    build = pretrained(tmp_path / "tiny.gguf")

    model = models.causal_lm(build["name"], dtype=torch.float32)

    torch.testing.assert_close(model(TOKENS).logits, tiny_llama()(TOKENS).logits)
    assert "converting" in caplog.text and "tiny.gguf has no tokenizer that can be read" in caplog.text
    monkeypatch.setattr(subprocess, "run", None)  # a second conversion would call it
    models.causal_lm(build["name"], dtype=torch.float32)
    assert models.tokenizer_name(build) is None
    assert check_build(KEY, build) == []


def test_hub_name_out_of_reach_is_refused_with_what_to_do(no_network):
    with pytest.raises(ConfigError) as caught:
        models.causal_lm("org/small", dtype=torch.float32)

    message = str(caught.value)
    assert message.startswith("build.name=org/small: no such folder, not in the hub's cache")
    assert "no route to org/small" in message and "give a local folder, fill the cache (HF_HOME)" in message


def test_broken_folder_is_refused_with_the_reason(folder):
    (folder / "config.json").write_text("{")

    with pytest.raises(ConfigError, match=r"build.name=.*tiny: could not be loaded from this folder: .*config.json"):
        models.causal_lm(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("settings", ["mapping", "folder"])
def test_config_gives_random_weights_of_its_shape(settings, folder):
    mapping = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 50}  # fmt: skip
    torch.manual_seed(0)

    first = models.causal_lm_from_config(mapping if settings == "mapping" else str(folder), dtype=torch.float32)
    second = models.causal_lm_from_config(mapping if settings == "mapping" else str(folder), dtype=torch.float32)

    expected = LlamaConfig(**mapping) if settings == "mapping" else LlamaConfig.from_pretrained(folder)
    assert first.config.hidden_size == expected.hidden_size
    assert len(first.model.layers) == expected.num_hidden_layers
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, second.model.layers[0].mlp.up_proj.weight)


def test_gradient_checkpointing_gives_the_same_gradient(folder):
    plain = models.causal_lm(str(folder), dtype=torch.float32).train()
    thrifty = models.causal_lm(str(folder), dtype=torch.float32, gradient_checkpointing=True).train()

    for model in (plain, thrifty):
        model(TOKENS, labels=TOKENS).loss.backward()

    assert any(getattr(module, "gradient_checkpointing", False) for module in thrifty.modules())
    assert not thrifty.config.use_cache
    torch.testing.assert_close(thrifty.get_input_embeddings().weight.grad, plain.get_input_embeddings().weight.grad)


def test_tokenizer_is_that_of_the_source(tmp_path, folder, monkeypatch):
    write_gguf(tiny_llama(1), tmp_path / "tiny.gguf", with_tokenizer=True)
    PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="tiny.gguf").save_pretrained(folder)
    monkeypatch.setattr(assets, "resolve", lambda name: folder)

    assert models.tokenizer_name(pretrained(folder)) == str(folder)
    assert models.tokenizer_name(pretrained("embedded:any")) == str(folder)
    assert models.tokenizer_name(pretrained("org/small")) == "org/small"
    assert models.tokenizer_name(from_config(str(folder))) == str(folder)
    assert models.tokenizer_name(from_config({"model_type": "llama"})) is None
    assert models.tokenizer_name({"_target_": "mine.build"}) is None
    assert AutoTokenizer.from_pretrained(models.tokenizer_name(pretrained(folder))).decode([3]) == "!"


def test_freezing_takes_matching_parameters_out_of_training():
    model = tiny_llama(2)

    frozen = freeze(model, ["model.layers.0.*", "*.input_layernorm.weight"])

    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert set(frozen) == still
    assert still == {name for name in dict(model.named_parameters()) if ".layers.0." in name} | {
        "model.layers.1.input_layernorm.weight"
    }


def test_freezing_the_head_freezes_the_embedding_that_it_is_tied_to():
    model = tiny_llama(1)

    assert freeze(model, ["lm_head.*"]) == ["lm_head.weight"]

    assert not model.get_input_embeddings().weight.requires_grad


def test_freezing_nothing_is_refused_with_the_nearest_names_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    message = r"^models\.m\.freeze: '0\.wieght' matches no parameter; nearest: 0\.weight.*models\.m\.freeze=\[\] trains"
    with pytest.raises(ConfigError, match=message):
        freeze(model, ["1.*", "0.wieght"], key="models.m.freeze")

    assert all(parameter.requires_grad for parameter in model.parameters())
