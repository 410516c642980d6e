"""Builders of encoders, their checks, and the presets over the embedded vocabulary."""

import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from trainer import check_builds, encoders, models
from trainer.config import ConfigError
from trainer.data import load_tokenizer

KEY = "models.query.build"
PRESETS = Path(__file__).parents[2] / "conf" / "model"
TOKENS = torch.tensor([[1, 50, 7, 3, 20], [1, 9, 4, 0, 0]])
MASK = (TOKENS != 0).long()
SETTINGS = {
    "model_type": "bert",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def pretrained(name):
    return {"_target_": "trainer.encoders.encoder", "name": str(name)}


def from_config(config):
    return {"_target_": "trainer.encoders.encoder_from_config", "config": config}


def preset(name):
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))


def tiny_bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**{key: value for key, value in SETTINGS.items() if key != "model_type"})).eval()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "bert"
    tiny_bert().save_pretrained(folder)
    return folder


def states(model):
    return model(input_ids=TOKENS, attention_mask=MASK).last_hidden_state


def test_folder_gives_the_saved_encoder_in_the_wanted_type(folder, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = encoders.encoder(str(folder), dtype=torch.float32)

    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(states(model)[MASK.bool()], states(tiny_bert())[MASK.bool()])
    assert encoders.encoder(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_attention_is_the_chosen_one(folder):
    assert encoders.encoder(str(folder), dtype=torch.float32).config._attn_implementation == "sdpa"

    model = encoders.encoder(str(folder), dtype=torch.float32, attn_implementation="eager")

    assert model.config._attn_implementation == "eager"


def test_weights_that_the_checkpoint_lacks_are_told(folder, caplog):
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    encoders.encoder(str(folder), dtype=torch.float32)

    assert "encoder.layer.1.output.dense.weight are not in the checkpoint and start at random" in caplog.text


@pytest.mark.parametrize("kind", ["mapping", "folder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_gives_random_weights_of_its_shape_and_type(kind, dtype, folder):
    config = SETTINGS if kind == "mapping" else str(folder)
    torch.manual_seed(1)

    first, second = (encoders.encoder_from_config(config, dtype=dtype) for _ in range(2))

    assert isinstance(first, BertModel) and {parameter.dtype for parameter in first.parameters()} == {dtype}
    assert (first.config.hidden_size, len(first.encoder.layer)) == (32, 2)
    weights = [model.embeddings.word_embeddings.weight for model in (first, second, tiny_bert().to(dtype))]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert states(first).shape == (2, 5, 32)


@pytest.mark.parametrize("builder", ["encoder", "encoder_from_config"])
def test_gradient_checkpointing_gives_the_same_gradient(builder, folder):
    gradients = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = getattr(encoders, builder)(str(folder), dtype=torch.float32, gradient_checkpointing=wanted).train()
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is wanted
        states(model).pow(2).sum().backward()
        gradients.append(model.embeddings.word_embeddings.weight.grad)

    torch.testing.assert_close(*gradients)


def test_good_builds_have_no_problem(folder):
    assert check_builds.check_build(KEY, pretrained(folder)) == []
    assert check_builds.check_build(KEY, from_config(str(folder))) == []
    assert check_builds.check_build(KEY, from_config(SETTINGS)) == []


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (pretrained("???"), f"{KEY}.name is missing; give a hub name"),
        (pretrained("/absent/bert"), f"{KEY}.name=/absent/bert: this folder does not exist"),
        (
            pretrained("embedded:bpe-4k"),
            f"{KEY}.name=embedded:bpe-4k: is a tokenizer, expected a model: embedded:all-minilm-l6-v2",
        ),
        (pretrained("embedded:bert"), f"{KEY}.name=embedded:bert: embedded:bert is no embedded model"),
        (from_config("/absent/bert"), f"{KEY}.config=/absent/bert: this folder does not exist"),
        (
            from_config({"model_type": "brt"}),
            f"{KEY}.config.model_type=brt is no model that transformers knows; nearest: ",
        ),
        (
            from_config({"model_type": "bert", "hiden_size": 3}),
            f"{KEY}.config.hiden_size is no setting of bert; nearest: hidden_size",
        ),
    ],
)
def test_wrong_build_is_found_before_anything_is_loaded(build, expected):
    problems = check_builds.check_build(KEY, build)

    assert len(problems) == 1 and problems[0].startswith(expected)


def test_encoder_without_a_decoder_is_no_language_model():
    causal = {"_target_": "trainer.models.causal_lm_from_config", "config": {"model_type": "distilbert"}}

    assert check_builds.check_build(KEY, from_config({"model_type": "distilbert"})) == []
    assert "model_type=distilbert is no language model" in check_builds.check_build(KEY, causal)[0]


def test_folder_without_weights_is_refused_by_both_the_check_and_the_builder(folder):
    (folder / "model.safetensors").write_bytes(b"half")

    assert "model.safetensors is broken" in check_builds.check_build(KEY, pretrained(folder))[0]
    with pytest.raises(ConfigError, match=r"build.name=.*bert: could not be loaded from this folder"):
        encoders.encoder(str(folder), dtype=torch.float32)


def test_tokenizer_is_that_of_the_folder(folder):
    assert models.tokenizer_name(pretrained(folder)) is None
    load_tokenizer("embedded:bpe-4k").save_pretrained(folder)

    assert models.tokenizer_name(pretrained(folder)) == str(folder)
    assert models.tokenizer_name(from_config(str(folder))) == str(folder)
    assert models.tokenizer_name(from_config(SETTINGS)) is None


@pytest.mark.parametrize(
    ("name", "base", "millions"),
    [
        ("tiny_llama", "causal_lm_from_config", 0.95),
        ("small_llama", "causal_lm_from_config", 3.61),
        ("tiny_bert", "encoder_from_config", 1.29),
    ],
)
def test_small_presets_fit_the_embedded_tokenizer(name, base, millions):
    tokenizer, node = load_tokenizer("embedded:bpe-4k"), preset(name)
    assert node["defaults"] == [base, "_self_"]
    build = preset(base) | {"config": node["config"]}
    assert check_builds.check_build(KEY, build) == []
    builders = {"causal_lm_from_config": models.causal_lm_from_config}
    builder = builders.get(base, encoders.encoder_from_config)
    assert build["_target_"] == f"{builder.__module__}.{base}"

    model = builder(node["config"], dtype=torch.float32)

    config = model.config
    ids = (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert ids == (len(tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert round(model.num_parameters() / 1e6, 2) == millions
    assert f"{millions:.2f}M parameters" in (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
