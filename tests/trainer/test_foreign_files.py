"""What a model's or a tokenizer's files may not do: run code, or lead out of their folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer.test_assets import tiny_llama
from tests.trainer.test_export import tiny_tokenizer
from trainer.check_builds import check_build
from trainer.config import ConfigError
from trainer.encoders import encoder
from trainer.models import causal_lm, empty_model

CODE = "from pathlib import Path\nPath(__file__).parent.joinpath('ran').touch()\nPath('{marker}').touch()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model and tokenizer whose configurations name Python code beside them."""
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(marker=tmp_path / "ran"))
    for name, auto_map in (
        ("config.json", {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoModel": "own.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.T", "own.T"]}),
    ):
        file = folder / name
        kind = {"model_type": "own"} if name == "config.json" else {"tokenizer_class": "OwnTokenizer"}
        file.write_text(json.dumps({**json.loads(file.read_text()), **kind, "auto_map": auto_map}))
    return folder


def ran(folder: Path) -> bool:
    return (folder.parent / "ran").exists()


@pytest.mark.parametrize("build", [causal_lm, encoder])
def test_a_model_with_code_of_its_own_is_refused_and_the_code_does_not_run(build, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")

    with pytest.raises(ConfigError, match="custom code"):
        build(str(folder), dtype=torch.float32)

    assert empty_model({"_target_": "trainer.models.causal_lm", "name": str(folder)}) is None
    assert not ran(folder)


def test_a_tokenizer_with_code_of_its_own_asks_nobody_and_does_not_run(folder: Path) -> None:
    code = f"from trainer.data.tokenizers import load_tokenizer; load_tokenizer({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True, timeout=120)

    assert "Do you wish to run the custom code" not in done.stdout + done.stderr
    assert not ran(folder)


def test_nobody_turns_trust_on() -> None:
    root = Path(__file__).parents[2]
    files = [file for name in ("trainer", "tasks", "conf", "examples") for file in (root / name).rglob("*.*")]
    texts = {file: file.read_text() for file in files if file.suffix in (".py", ".yaml")}

    assert [file for file in texts if "trust_remote_code=True" in texts[file]] == []
    assert [file for file in texts if "trust_remote_code: true" in texts[file]] == []


@pytest.mark.parametrize("shard", ["../other.safetensors", "/tmp/other.safetensors", "sub/../../other.safetensors"])
def test_an_index_that_leads_out_of_its_folder_is_refused(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    (problem,) = check_build("models.m.build", {"_target_": "trainer.models.causal_lm", "name": str(folder)})

    assert f"model.safetensors.index.json names {shard}, which is not in the folder" in problem


def test_a_pickle_among_the_weights_runs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")

    with pytest.raises(ConfigError):
        causal_lm(str(folder), dtype=torch.float32)

    assert not ran(folder)


def test_an_own_models_weights_are_read_as_safetensors_only(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    sources = [file.read_text() for file in (Path(__file__).parents[2] / "trainer").rglob("*.py")]

    assert not [text for text in sources if "torch.load(" in text or "import pickle" in text]
