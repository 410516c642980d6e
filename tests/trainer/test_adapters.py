"""Adapters, tied weights, gradient checkpointing, partly frozen models: as in plain PyTorch under each ZeRO stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.ranks import run_ranks
from tests.trainer.adapter_runs import (
    BUILD,
    EXPORTED,
    FROZEN,
    LORA,
    LR,
    NET_LORA,
    POINTS,
    STAGES,
    TOKENS,
    cross_entropy,
    make_net,
    run_checks,
)
from tests.trainer.engine_runs import Found
from tests.trainer.test_assets import tiny_llama
from tests.trainer.test_check import problems_of
from tests.trainer.test_export import tiny_tokenizer
from tests.trainer.test_trainer import difference
from trainer.adapters import check_fit, check_folder, check_lora

ZERO = {0: "SGD", 1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
Runs = list[dict[int, dict[str, Found]]]

stages = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    tiny_llama(1).save_pretrained(folder / "llama")
    tiny_tokenizer().save_pretrained(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Runs:
    return run_ranks(run_checks, folder, True, folder=folder, world_size=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Runs:
    return run_ranks(run_checks, folder, False, folder=folder, world_size=2)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request: pytest.FixtureRequest) -> Runs:
    found: Runs = request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")
    return found


def plain_llama(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)


def plain_fit(model: nn.Module, start: dict[str, Tensor], loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Returns the weights after two updates of plain PyTorch in this process."""
    model.load_state_dict(start)
    model.train()
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=LR)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def llama_loss(model: nn.Module) -> Tensor:
    return cross_entropy(model(input_ids=TOKENS).logits, TOKENS)


def net_loss(model: nn.Module) -> Tensor:
    return model(POINTS).pow(2).mean()


def moved(found: Found) -> set[str]:
    return {name for name, value in found["start"].items() if not torch.equal(value, found["end"][name])}


def is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


# Adapters


@stages
@pytest.mark.parametrize("model", ["lora", "net"])
def test_adapters_are_under_the_stage_that_is_claimed(runs: Runs, stage: int, model: str) -> None:
    for rank in runs:
        found = rank[stage][model]
        assert found["engine"] == ("DeepSpeedEngine", stage)
        assert found["zero"] == ZERO[stage]
        assert found["is sharded"] == (stage == 3)


@stages
def test_fresh_adapters_change_nothing(runs: Runs, folder: Path, stage: int) -> None:
    with torch.no_grad():
        base = plain_llama(folder).eval()(input_ids=TOKENS).logits

    for rank in runs:
        assert torch.equal(rank[stage]["lora"]["first outputs"], base)
    start = runs[0][stage]["lora"]["start"]
    assert not any(value.any() for name, value in start.items() if "lora_B" in name)
    assert all(value.std() > 0.01 for name, value in start.items() if "lora_A" in name)


@stages
def test_adapters_start_alike_under_every_stage_and_number_of_ranks(runs: Runs, one_rank: Runs, stage: int) -> None:
    for model in ("lora", "net"):
        expected = one_rank[0][0][model]["start"]
        assert all(torch.equal(value, expected[name]) for name, value in runs[0][stage][model]["start"].items())


@stages
@pytest.mark.parametrize("model", ["lora", "net"])
def test_only_adapters_change(runs: Runs, stage: int, model: str) -> None:
    found = runs[0][stage][model]

    assert moved(found) == {name for name in found["start"] if is_adapter(name)} == found["trained"]


@stages
def test_adapters_of_a_llama_equal_those_of_plain_peft(runs: Runs, folder: Path, stage: int) -> None:
    found = runs[0][stage]["lora"]

    expected = plain_fit(get_peft_model(plain_llama(folder), LoraConfig(**LORA)), found["start"], llama_loss)

    assert difference(found["end"], expected) < 1e-6


@stages
def test_adapters_of_a_plain_module_equal_those_of_plain_peft(runs: Runs, stage: int) -> None:
    found = runs[0][stage]["net"]

    expected = plain_fit(get_peft_model(make_net(), LoraConfig(**NET_LORA)), found["start"], net_loss)

    assert difference(found["end"], expected) < 1e-6


@stages
def test_adapters_learn_the_same_with_gradient_checkpointing(two_ranks: Runs, stage: int) -> None:
    found, without = two_ranks[0][stage]["lora checkpointed"], two_ranks[0][stage]["lora"]

    assert found["engine"] == ("DeepSpeedEngine", stage)
    assert moved(found) == {name for name in found["start"] if is_adapter(name)}
    assert difference(found["end"], without["end"]) < 1e-6


@stages
def test_plan_counts_the_whole_model_and_what_is_trained(runs: Runs, folder: Path, stage: int) -> None:
    base = sum(value.numel() for value in plain_llama(folder).parameters())
    for rank in runs:
        found = rank[stage]["lora"]
        adapters = sum(value.numel() for name, value in runs[0][stage]["lora"]["start"].items() if is_adapter(name))
        assert found["counts"] == (base + adapters, adapters)
        assert found["plan"]["parameters"] == f"{(base + adapters) / 1e3:.1f}k ({adapters / 1e3:.1f}k trained)"


# Export of adapters


@pytest.mark.parametrize("stage", EXPORTED)
def test_exported_adapter_loads_onto_its_base_and_gives_the_same_logits(
    two_ranks: Runs, folder: Path, stage: int
) -> None:
    target = folder / f"llama{stage}"
    config = json.loads((target / "adapter_config.json").read_text())

    assert config["base_model_name_or_path"] == str(folder / "llama")
    assert all(".lora_" in name for name in load_file(target / "adapter_model.safetensors"))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "llama"), target)
    with torch.no_grad():
        logits = loaded(input_ids=TOKENS).logits
    for rank in two_ranks:
        torch.testing.assert_close(logits, rank[stage]["lora"]["last outputs"], rtol=0, atol=1e-5)
    assert (logits - two_ranks[0][stage]["lora"]["first outputs"]).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("stage", EXPORTED)
def test_exported_adapter_of_a_plain_module_stands_beside_its_build(two_ranks: Runs, folder: Path, stage: int) -> None:
    target, found = folder / f"net{stage}", two_ranks[0][stage]["net"]
    base = make_net()
    names = {"0.weight": "0.base_layer.weight", "0.bias": "0.base_layer.bias"}
    names |= {f"2.{kind}": f"2.original_module.{kind}" for kind in ("weight", "bias")}
    base.load_state_dict({own: found["start"][f"base_model.model.{name}"] for own, name in names.items()})

    loaded = PeftModel.from_pretrained(base, target)

    assert yaml.safe_load((target / "build.yaml").read_text()) == BUILD
    assert set(load_file(target / "adapter_model.safetensors")) == {
        f"base_model.model.{name}" for name in ("0.lora_A.weight", "0.lora_B.weight", "2.weight", "2.bias")
    }
    torch.testing.assert_close(loaded(POINTS), found["last outputs"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", EXPORTED)
@pytest.mark.parametrize("model", ["lora", "net"])
def test_reloaded_adapter_scores_as_in_memory(two_ranks: Runs, stage: int, model: str) -> None:
    for rank in two_ranks:
        found = rank[stage][model]
        assert found["scores"] == pytest.approx(found["after"], rel=1e-6)
        assert found["after"]["val/loss"] < found["before"]["val/loss"]


# Tied weights, gradient checkpointing, partly frozen models


@stages
def test_tied_weights_stay_tied_and_equal_plain_pytorch(two_ranks: Runs, folder: Path, stage: int) -> None:
    found = two_ranks[0][stage]["whole"]

    expected = plain_fit(plain_llama(folder), found["start"], llama_loss)

    assert found["engine"] == ("DeepSpeedEngine", stage)
    assert found["zero"] == ZERO[stage]
    assert found["end"]["lm_head.weight"].data_ptr() == found["end"]["model.embed_tokens.weight"].data_ptr()
    assert moved(found) == set(found["start"])
    assert difference(found["end"], expected) < 1e-6


@stages
def test_gradient_checkpointing_makes_the_same_update(two_ranks: Runs, stage: int) -> None:
    found, without = two_ranks[0][stage]["checkpointed"], two_ranks[0][stage]["whole"]

    assert found["engine"] == ("DeepSpeedEngine", stage)
    assert difference(found["end"], without["end"]) < 1e-6


@stages
def test_partly_frozen_model_equals_plain_pytorch(two_ranks: Runs, folder: Path, stage: int) -> None:
    from trainer.freezing import freeze

    found, model = two_ranks[0][stage]["partly frozen"], plain_llama(folder)
    frozen = set(freeze(model, FROZEN))
    tied = {"lm_head.weight", "model.embed_tokens.weight"}

    expected = plain_fit(model, found["start"], llama_loss)

    assert found["zero"] == ZERO[stage]
    assert moved(found) == set(found["start"]) - frozen - tied
    assert difference(found["end"], expected) < 1e-6


# Settings


def lora_problems(settings: dict[str, Any], **model: Any) -> list[str]:
    return check_lora("models.student", settings, **{"trainable": True, "freeze": [], "stage": 2, **model})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rr": 4}, "lora.rr: peft.LoraConfig has no such setting that is a plain value; nearest: r"),
        ({"r": "many"}, "lora.r=many: must be a whole number"),
        ({"r": 0}, "lora.r=0: must be at least 1"),
        ({"lora_alpha": 0}, "lora.lora_alpha=0: must be above 0"),
        ({"lora_dropout": 1.0}, "lora.lora_dropout=1.0: must be at least 0 and below 1"),
        ({"bias": "some"}, "lora.bias=some: must be one of none, all, lora_only"),
        ({"target_modules": 3}, "lora.target_modules=3: must be a list or a text or null"),
        ({"init_lora_weights": "pissa"}, "lora.init_lora_weights=pissa: must be true, false or gaussian"),
        ({"base_model_name_or_path": "x"}, "lora.base_model_name_or_path: the trainer gives this one itself"),
        ({"target_modules": ".*", "layers_to_transform": 1}, "lora: `layers_to_transform` cannot be used when"),
    ],
)
def test_setting_that_cannot_be_is_refused(settings: dict[str, Any], reason: str) -> None:
    (problem,) = lora_problems(settings)

    assert problem.startswith(f"models.student.{reason}")
    assert "\n" not in problem


def test_adapters_fit_neither_a_frozen_model_nor_frozen_names_nor_dora_sharded_weights() -> None:
    assert lora_problems({"r": 4}) == []
    assert lora_problems({}, trainable=False, freeze=["*"]) == []
    (frozen,), (names,) = lora_problems({"r": 4}, trainable=False), lora_problems({"r": 4}, freeze=["*"])
    assert frozen.startswith("models.student.lora is given, but models.student is frozen")
    assert names.startswith("models.student.freeze is given beside models.student.lora")
    assert lora_problems({"use_dora": True}) == []
    (sharded,) = lora_problems({"use_dora": True}, stage=3)
    assert sharded.startswith("models.student.lora.use_dora")


def test_module_that_is_not_there_or_cannot_be_sharded_is_named() -> None:
    llama = tiny_llama(1)

    listed = check_fit("lora", {"target_modules": ["q_prj", "v_proj"], "modules_to_save": ["head"]}, llama, stage=0)
    (pattern,) = check_fit("lora", {"target_modules": "nothing"}, llama, stage=0)

    assert listed == [
        "lora.target_modules: the model has no module q_prj; nearest: q_proj",
        "lora.modules_to_save: the model has no module head; nearest: lm_head",
    ]
    assert check_fit("lora", {"target_modules": ["embed_tokens"]}, tiny_llama(1), stage=2) == []
    (sharded,) = check_fit("lora", {"target_modules": ["embed_tokens"]}, tiny_llama(1), stage=3)
    assert sharded.startswith("lora: model.embed_tokens is among target_modules, but peft reads its weights")
    assert pattern.startswith("lora: Target modules nothing not found in the base model.")


def test_adapter_folder_builds_a_frozen_model_only(folder: Path, tmp_path: Path) -> None:
    get_peft_model(plain_llama(folder), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "lost").mkdir()
    lost = config | {"base_model_name_or_path": "/nowhere/base"}
    (tmp_path / "lost" / "adapter_config.json").write_text(json.dumps(lost))

    (trained,) = check_folder("key", f"{tmp_path}/adapter", trainable=True)
    (gone,) = check_folder("key", f"{tmp_path}/lost", trainable=False)

    assert check_folder("key", f"{tmp_path}/adapter", trainable=False) == []
    assert check_folder("key", f"{folder}/llama", trainable=True) == []
    assert trained.startswith(f"key={tmp_path}/adapter: this folder holds an adapter, which builds a frozen model only")
    assert "an adapter, which belongs to /nowhere/base, which is not there" in gone


def test_model_of_an_adapter_folder_is_base_and_adapter(two_ranks: Runs, folder: Path) -> None:
    from trainer.models import causal_lm

    model = causal_lm(str(folder / "llama3"), dtype=torch.float32).eval()

    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, two_ranks[0][3]["lora"]["last outputs"], rtol=0, atol=1e-5)


def test_command_line_takes_adapters_without_a_plus(folder: Path) -> None:
    student = (
        "model@models.student.build=causal_lm",
        "~models.student.build.config",
        f"models.student.build.name={folder}/llama",
    )
    lora = ("models.student.lora.r=8", "models.student.lora.target_modules=all-linear")

    assert problems_of(*student, *lora) == []
    assert problems_of(*student, "models.student.lora={r: 8}", "models.student.lora=null") == []
    (unknown,) = problems_of(*student, *lora, "models.student.lora.ranks=3")
    (random,) = problems_of(*lora)
    assert unknown.startswith("models.student.lora.ranks: peft.LoraConfig has no such setting")
    assert random.startswith("models.student.lora: the export holds the adapters, not the random weights")
