"""What is wrong with a build node is known before anything is allocated, fetched or converted."""

import json

import pytest

from tests.trainer.test_assets import tiny_llama, write_gguf
from tests.trainer.test_models import KEY, from_config, pretrained
from trainer import check_builds, models
from trainer.check_builds import check_build
from trainer.freezing import find_freezing_problems

pytestmark = pytest.mark.usefixtures("cache")


def test_good_builds_have_no_problem(folder):
    assert check_build(KEY, pretrained(folder)) == []
    assert check_build(KEY, pretrained("embedded:smollm2-135m-instruct-22l")) == []
    assert check_build(KEY, from_config(str(folder))) == []
    settings = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "hidden_size": 16, "use_cache": False}
    assert check_build(KEY, from_config(settings)) == []
    assert check_build(KEY, {"_target_": "mine.build", "name": "whatever"}) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "is missing; give a hub name"),
        ("???", "is missing; give a hub name"),
        ("{tmp}/tyny", "this folder does not exist; nearest: {tmp}/tiny"),
        ("{tmp}/absent/tiny", "this folder does not exist, nor does the folder {tmp}/absent"),
        ("{tmp}/absent.gguf", "this .gguf file does not exist"),
        ("{tmp}/bad.gguf", "is no GGUF file"),
        ("{tmp}", "this folder has no config.json; nearest: {tmp}/tiny"),
        ("{tmp}/tiny/config.json", "is a file; give the folder"),
        ("embedded:smollm2-135m-instruct-22", "nearest: embedded:smollm2-135m-instruct-22l"),
        ("org/small", "not in the hub's cache, and the hub gave none (no route to org/small)"),
    ],
)
def test_wrong_name_is_found_before_anything_is_loaded(name, expected, tmp_path, folder, no_network):
    (tmp_path / "bad.gguf").write_text("<html>not found</html>")
    name, expected = (text.replace("{tmp}", str(tmp_path)) for text in (name, expected))

    problems = check_build(KEY, pretrained(name))

    assert len(problems) == 1
    assert problems[0].startswith("models.student.build.name") and expected in problems[0]


def test_missing_gguf_package_is_found(tmp_path, monkeypatch):
    write_gguf(tiny_llama(1), tmp_path / "tiny.gguf", with_tokenizer=False)
    monkeypatch.setattr(check_builds.importlib.util, "find_spec", lambda name: None)

    assert "pip install gguf" in check_build(KEY, pretrained(tmp_path / "tiny.gguf"))[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "lama"}, "config.model_type=lama is no language model that transformers knows; nearest: llama"),
        ({"hidden_size": 3}, "config.model_type=None is no language model"),
        (
            {"model_type": "llama", "num_hidden_layers": 10**12},
            "num_hidden_layers=1000000000000: must be at most 10000",
        ),
        ({"model_type": "llama", "num_hidden_layers": -1}, "config.num_hidden_layers=-1: must be at least 1"),
        ({"model_type": "llama", "hiden_size": 3}, "config.hiden_size is no setting of llama; nearest: hidden_size"),
        ({"model_type": "llama", "default_theta": 5e5}, "config.default_theta is no setting of llama; nearest: rope_"),
        ({"model_type": "llama", "save_pretrained": 1}, "config.save_pretrained is no setting of llama"),
        (
            {"model_type": "llama", "return_dict": False},
            "config.return_dict=False: must be true, since outputs are read",
        ),
        ({"model_type": "llama", "sub_configs": {}}, "config.sub_configs is no setting of llama"),
        ({"model_type": "llama", "temperature": 0.5}, "config.temperature is no setting of llama"),
        ({"model_type": "gpt2", "rope_theta": 5e5}, "config.rope_theta is no setting of gpt2"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_typ": "default"}},
            "config.rope_parameters.rope_typ is no setting of a rotary embedding; nearest: rope_type",
        ),
    ],
)
def test_wrong_settings_are_found_with_the_nearest_name(settings, expected):
    assert expected in check_build(KEY, from_config(settings))[0]


SMALL = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip


def test_settings_that_a_config_takes_by_an_older_name_are_sound():
    for change in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}, {"num_labels": 3}):
        assert check_build(KEY, from_config({**SMALL, **change})) == []
    model = models.empty_model(from_config({**SMALL, "rope_theta": 5e5}))
    assert model.config.rope_parameters["rope_theta"] == 5e5
    assert check_build(KEY, from_config({"model_type": "bloom", "n_embed": 64, "n_layer": 1})) == []
    assert check_build(KEY, from_config({"model_type": "gemma3_text", "sliding_window_pattern": 2})) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 15}, "The hidden size (15) is not a multiple of the number of attention heads (2)"),
        ({"num_hidden_layers": "two"}, "Field 'num_hidden_layers' expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"head_dim": -8}, "negative dimension"),
        ({"hidden_act": "silly"}, "KeyError: 'silly'"),
        ({"pad_token_id": 64}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_settings_that_make_no_model_are_found(change, expected):
    (problem,) = check_build(KEY, from_config({**SMALL, **change}))

    assert problem.startswith(f"{KEY}.config: transformers cannot make this model: ") and expected in problem


def test_a_folder_whose_config_makes_no_model_is_found(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    (problem,) = check_build(KEY, pretrained(folder))
    assert problem.startswith(f"{KEY}.name={folder}: transformers cannot make this model")

    (folder / "config.json").write_text("{")
    (problem,) = check_build(KEY, pretrained(folder))
    assert problem.startswith(f"{KEY}.name={folder}: transformers cannot make this model")


def test_an_attention_that_the_model_cannot_use_is_found(folder):
    def problems(name, build=None):
        return check_build(KEY, {**(build or from_config(SMALL)), "attn_implementation": name})

    assert problems("sdp")[0].startswith(f"{KEY}.attn_implementation=sdp: transformers has eager, ")
    assert problems("sdp")[0].endswith("; did you mean sdpa?")
    assert "did you mean" not in problems("foo", pretrained("embedded:smollm2-135m-instruct"))[0]
    assert problems("paged|eager") != []
    assert problems("1") != [] and problems(1) == [], "targets.py names what is no text"
    if not check_builds.is_kernels_available():
        (problem,) = problems("flash_attention_4", pretrained(folder))
        assert problem.startswith(f"{KEY}.attn_implementation=flash_attention_4: Flash") and "installed" in problem
    assert problems("eager") == problems("flex_attention") == problems(None) == problems("org/kernel") == []


def test_names_of_weights_are_known_before_a_model_is_fetched(folder, cache):
    def problems(build, *patterns):
        return find_freezing_problems(models.empty_model(build), list(patterns), key="models.m.freeze")

    asset = pretrained("embedded:smollm2-135m-instruct-22l")
    assert problems(asset, "model.layers.21.*") == []
    (problem,) = problems(asset, "model.layers.22.mlp.*")
    assert "'model.layers.22.mlp.*' matches no parameter; nearest: model.layers.21.mlp." in problem
    assert not cache.exists()
    assert len(problems(pretrained(folder), "model.layer.*", "gone")) == 2
    assert problems(from_config(SMALL), "*") == [
        "models.m.freeze=['*'] freezes every parameter; drop some, or set trainable=false"
    ]
    assert models.empty_model(pretrained("embedded:all-minilm-l6-v2")) is None  # its config is in what is fetched
    assert models.empty_model({"_target_": "mine.build"}) is None
